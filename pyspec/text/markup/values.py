"""Where a value ends that is bare text between marks, in dialects with one element for each argument.

Nothing in such a value is escaped. Its end mark ends it where what may stand behind a value follows, so that a text which speaks of this
markup can be an argument; and models leave the end mark out at times, or write another, most in long contexts. So a value ends, too, before
the mark that ends the call, if what may stand behind a call follows, and before the next argument, if that is one of the tool's which is not there
yet. A whole call inside a value is text of it. Where a grammar wrote the value, it ends where the grammar ended it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from pyspec.text.markup.ahead import GAP, NAME, OVER, TAIL, Row, Step
from pyspec.text.markup.reader import AnswerReader, Steps

CLOSING = frozenset(".)]}>")  # what a value ends with, where the next argument stands in the same line


@dataclass(frozen=True, slots=True)
class ValueMarks:
    """Marks around values.

    end       begins the end mark, up to where models write it differently
    held_end  what a grammar ends a value with
    key       begins the next argument
    key_end   what may stand behind its name
    arguments_end  the marks of which one ends all arguments
    call_end  the marks of which one ends the call behind that; (): they are the same
    call      begins a whole call
    """

    end: str
    held_end: str
    key: str
    key_end: Row
    arguments_end: Step
    call_end: Step
    call: Row

    @property
    def marks(self) -> tuple[str, ...]:
        others = dict.fromkeys((self.key, *self.arguments_end, *self.call_end, *self.call[0]))
        on_line = ("\n" + self.end,) if self.held_end.startswith("\n") else ()
        return (self.end, *on_line, *others, *("\n" + mark for mark in others))

    @property
    def behind_arguments(self) -> Step:
        return (*self.call_end, *self.call[0], *(self.call[-1] if self.call_end else ()))

    def is_spelled(self, text: str) -> bool:
        """Whether a grammar can write this text as a value: it does not end before its end."""
        return (text + self.held_end).find(self.held_end) == len(text)


def read_value(
    reader: AnswerReader, marks: ValueMarks, give: Callable[[str], None], expected: Collection[str] | None
) -> Steps[bool]:
    """A value, given away as it comes, up to its end, which is passed over. False if the answer ends before it does.

    expected  the arguments that may come next; None: the tool does not say
    """
    if reader.is_held:
        return bool((yield from reader.until((marks.held_end,), give)))
    value, depth = _Value(give), 0
    while mark := (yield from reader.find(marks.marks, value)):
        bare = mark.lstrip("\n")
        is_line = bare != mark or value.last == "\n"
        lead: Row = () if bare == mark else (("\n",),)
        if bare == marks.end:
            row = (*lead, *_behind_end(marks, depth))
            if (yield from reader.sees(row)):
                yield from reader.take_mark("\n")
                yield from _pass_tail(reader, marks)
                return True
        elif depth and bare in (marks.call_end or marks.arguments_end):
            depth -= 1
        elif bare in marks.call[0] and (yield from reader.sees((*lead, *marks.call), cut_fits=False)):
            depth += 1
        elif not depth and (yield from reader.sees((*lead, *_without_end(marks, bare, is_line, value.last, expected)))):
            return True
        reader.skip(len(mark))
        value(mark)
    return False


class _Value:
    """Passes a value on. last: its last character."""

    def __init__(self, give: Callable[[str], None]) -> None:
        self._give, self.last = give, "\n"

    def __call__(self, text: str) -> None:
        self._give(text)
        self.last = text[-1:] or self.last


def _behind_end(marks: ValueMarks, depth: int) -> Row:
    """An end mark, and what shows that it is one: behind the text of a whole call only the answer's end does."""
    end: Row = ((marks.end,), TAIL, GAP)
    if not depth:
        return (*end, (marks.key, *marks.arguments_end, *marks.call_end))
    closing: Row = (marks.arguments_end, GAP, marks.call_end, GAP) if marks.call_end else (marks.arguments_end, GAP)
    return (*end, *closing, OVER)


_NEVER: Row = ((),)


def _without_end(marks: ValueMarks, mark: str, is_line: bool, last: str, expected: Collection[str] | None) -> Row:
    """What shows that a value ended before this mark without one of its own."""
    if mark == marks.key:
        if not is_line and (expected is None or not (last.isalnum() or last in CLOSING)):
            return _NEVER
        return ((mark,), NAME if expected is None else tuple(expected), *marks.key_end)
    if mark in marks.arguments_end and marks.call_end:
        behind = marks.behind_arguments
        return ((mark,), GAP, behind) if is_line else ((mark,), GAP, marks.call_end, GAP, marks.call[0])
    if mark in (*marks.call_end, *marks.arguments_end):
        return ((mark,), GAP, marks.call[0])
    return _NEVER


def _pass_tail(reader: AnswerReader, marks: ValueMarks) -> Steps[None]:
    yield from reader.take_mark(marks.end)
    yield from reader.pass_line("<\n")
