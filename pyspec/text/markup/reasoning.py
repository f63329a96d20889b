"""What a model thinks before it answers: from <think> to </think>, the first of which may stand in the prompt already.

Models call a tool at times without the end mark, and then nothing follows: a call ends the reasoning, too. What only speaks of a call is a
thought: the mark in quotes or in a fenced block, or with something behind it that is no call of a tool which was offered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspec.text.markup.ahead import Row
from pyspec.text.markup.reader import AnswerReader, Steps, Trimmed


@dataclass(frozen=True, slots=True)
class ThinkMarks:
    """What reasoning stands between."""

    start: str
    end: str


QUOTES = frozenset("'\"`")
FENCE = 3  # backticks

THINK = ThinkMarks("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class ThoughtForm:
    """How the reasoning of one answer is read.

    is_open   the prompt ends within it
    is_shown  it stays in the content, marks and all
    heads     how calls begin that end it; (): none does
    """

    is_open: bool
    is_shown: bool
    heads: tuple[Row, ...] = ()


def read_reasoning(reader: AnswerReader, marks: ThinkMarks, form: ThoughtForm) -> Steps[bool]:
    """The reasoning at the beginning of an answer; whether there was some."""
    if not form.is_open:
        spaces = yield from reader.take_spaces()
        if not (yield from reader.take_mark(marks.start)):
            reader.content(spaces)
            return False
        if form.is_shown:
            reader.content(spaces + marks.start)
    out = Trimmed(reader.content, trims_start=False) if form.is_shown else Trimmed(reader.reasoning)
    thought = _Thought(out)
    options = tuple(dict.fromkeys([marks.end, *(mark for row in form.heads for mark in row[0])]))
    while (mark := (yield from reader.find(options, thought))) not in ("", marks.end):
        if not thought.is_quote and (yield from _begins(reader, form.heads)):
            reader.stray = marks.end
            return True
        reader.skip(len(mark))
        thought(mark)
    yield from reader.take_mark(marks.end)
    if form.is_shown:
        out.flush()
        reader.content(mark)
    return True


def _begins(reader: AnswerReader, heads: tuple[Row, ...]) -> Steps[bool]:
    for row in heads:
        if (yield from reader.sees(row, cut_fits=False)):
            return True
    return False


class _Thought:
    """Passes reasoning on, and knows whether what comes next stands in quotes or in a fenced block."""

    def __init__(self, give: Callable[[str], None]) -> None:
        self._give = give
        self._last, self._n_ticks, self._is_fenced = "", 0, False

    def __call__(self, text: str) -> None:
        self._give(text)
        self._last = text.rstrip(" ")[-1:] or self._last
        if "`" not in text and not self._n_ticks:
            return
        for char in text:
            self._n_ticks = self._n_ticks + 1 if char == "`" else 0
            if self._n_ticks == FENCE:
                self._is_fenced = not self._is_fenced

    @property
    def is_quote(self) -> bool:
        return self._is_fenced or self._last in QUOTES
