"""What a model thinks before it answers: from <think> to </think>, the first of which may stand in the prompt already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspec.text.markup.reader import AnswerReader, Steps, Trimmed


@dataclass(frozen=True, slots=True)
class ThinkMarks:
    """What reasoning stands between."""

    start: str
    end: str


THINK = ThinkMarks("<think>", "</think>")


def read_reasoning(reader: AnswerReader, marks: ThinkMarks, *, is_open: bool, is_shown: bool) -> Steps[bool]:
    """The reasoning at the beginning of an answer; whether there was some.

    is_open   the prompt ends within it
    is_shown  it stays in the content, marks and all: nothing in it is a call
    """
    if not is_open:
        spaces = yield from reader.take_spaces()
        if not (yield from reader.take_mark(marks.start)):
            reader.content(spaces)
            return False
        if is_shown:
            reader.content(spaces + marks.start)
    give: Callable[[str], None] = reader.content if is_shown else Trimmed(reader.reasoning)
    found = yield from reader.until((marks.end,), give)
    if is_shown:
        reader.content(found)
    return True
