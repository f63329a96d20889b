"""Finds the end of a value that is bare text between marks, in dialects with one element for each argument.

Such a value has no escapes. Its end mark counts only if the next text may follow a value, so that an argument may contain this
markup. Models sometimes leave out the end mark or write another one, mostly in long contexts. So a value also ends before the mark
that ends the call, if the next text may follow a call, and before the next argument, if it is one of the tool's that is still missing.
A whole call inside a value is part of it. If a grammar wrote the value, it ends only where the grammar ended it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from pyspec.text.markup.ahead import GAP, NAME, OVER, TAIL, Lookahead, Step
from pyspec.text.markup.reader import AnswerReader, Emit, Steps, Tools
from pyspec.text.markup.typed import ArgumentWriter, ValueWriter

NAME_CHARS = 256  # of a name at most
CLOSING = frozenset(".)]}>")  # last characters of a value before another argument on the same line


@dataclass(frozen=True, slots=True)
class ValueMarks:
    """Marks around values.

    end       the start of the end mark, up to the part that models vary
    constrained_end  the end of a value that a grammar wrote
    key       begins the next argument
    key_end   possible text behind its name
    arguments_end  marks that end all arguments
    call_end  marks that end the call behind that; (): arguments_end does
    call      begins a whole call
    """

    end: str
    constrained_end: str
    key: str
    key_end: Lookahead
    arguments_end: Step
    call_end: Step
    call: Lookahead

    @property
    def marks(self) -> tuple[str, ...]:
        others = dict.fromkeys((self.key, *self.arguments_end, *self.call_end, *self.call[0]))
        on_line = ("\n" + self.end,) if self.constrained_end.startswith("\n") else ()
        return (self.end, *on_line, *others, *("\n" + mark for mark in others))

    @property
    def behind_arguments(self) -> Step:
        return (*self.call_end, *self.call[0], *(self.call[-1] if self.call_end else ()))


ReadKey = Callable[[AnswerReader, ArgumentWriter], Steps[ValueWriter | None]]
"""Reads an argument's name behind `ValueMarks.key`. Returns the writer of its value; None if it is not an argument."""


def read_bare_arguments(
    reader: AnswerReader, marks: ValueMarks, arguments: ArgumentWriter, read_key: ReadKey
) -> Steps[None]:
    """Read arguments up to the mark that ends them. Other text between them is dropped."""
    ends = (*marks.arguments_end, *marks.call_end)
    while (mark := (yield from reader.skip_until(marks.key, *ends))) == marks.key:
        value = yield from read_key(reader, arguments)
        if value is None:
            continue
        if not (yield from read_value(reader, marks, value, arguments.expected)):
            return  # cut off
        value.end()
    if mark:
        arguments.end()


def read_named_call(
    reader: AnswerReader, text: str, tools: Tools, end: str, marks: ValueMarks, read_key: ReadKey
) -> Steps[str]:
    """Read a call behind its mark, `text`: the tool's name up to `end`, then arguments. Returns "", or the text if it is no call."""
    name, found = yield from reader.take_name(tools, end, most=NAME_CHARS)
    if not (name and found):
        return text + name + found
    reader.begin_call(name)
    yield from read_bare_arguments(reader, marks, ArgumentWriter(reader, tools.get(name, {})), read_key)
    return ""


def read_value(
    reader: AnswerReader, marks: ValueMarks, emit: Emit, expected: Collection[str] | None
) -> Steps[bool]:
    """Pass on a value up to its end, which is consumed. Returns False if the answer ends first.

    expected  arguments that may come next; None: any
    """
    if reader.is_constrained:
        return bool((yield from reader.until((marks.constrained_end,), emit)))
    value, depth = _Value(emit), 0
    while mark := (yield from reader.find(marks.marks, value)):
        bare = mark.lstrip("\n")
        is_line = bare != mark or value.last == "\n"
        lead: Lookahead = () if bare == mark else (("\n",),)
        whole_call: Lookahead = (*lead, *marks.call)
        if bare == marks.end:
            lookahead = (*lead, *_behind_end(marks, depth))
            if (yield from reader.sees(lookahead)):
                yield from reader.take_mark("\n")
                yield from _pass_tail(reader, marks)
                return True
        elif depth and bare in (marks.call_end or marks.arguments_end):
            depth -= 1
        elif bare in marks.call[0] and (yield from reader.sees(whole_call, cut_fits=False)):
            depth += 1
        elif not depth:
            end = _without_end(marks, bare, is_line, value.last, expected)
            if (yield from reader.sees((*lead, *end))):
                return True
        reader.skip(len(mark))
        value(mark)
    return False


class _Value:
    """Passes on a value. last: its last character."""

    def __init__(self, emit: Emit) -> None:
        self._emit, self.last = emit, "\n"

    def __call__(self, text: str) -> None:
        self._emit(text)
        self.last = text[-1:] or self.last


def _behind_end(marks: ValueMarks, depth: int) -> Lookahead:
    """An end mark and the text that confirms it. Behind the text of a whole call, only the answer's end confirms it."""
    end: Lookahead = ((marks.end,), TAIL, GAP)
    if not depth:
        return (*end, (marks.key, *marks.arguments_end, *marks.call_end))
    closing: Lookahead = (marks.arguments_end, GAP)
    if marks.call_end:
        closing = (*closing, marks.call_end, GAP)
    return (*end, *closing, OVER)


_NEVER: Lookahead = ((),)


def _without_end(
    marks: ValueMarks, mark: str, is_line: bool, last: str, expected: Collection[str] | None
) -> Lookahead:
    """The text that confirms that a value ended before this mark without its own end mark."""
    if mark == marks.key:
        if not is_line and (expected is None or not (last.isalnum() or last in CLOSING)):
            return _NEVER
        return ((mark,), NAME if expected is None else tuple(expected), *marks.key_end)
    if mark in marks.arguments_end and marks.call_end:
        behind = marks.behind_arguments
        if is_line:
            return ((mark,), GAP, behind)
        return ((mark,), GAP, marks.call_end, GAP, marks.call[0])
    if mark in (*marks.call_end, *marks.arguments_end):
        return ((mark,), GAP, marks.call[0])
    return _NEVER


def _pass_tail(reader: AnswerReader, marks: ValueMarks) -> Steps[None]:
    yield from reader.take_mark(marks.end)
    yield from reader.pass_line("<\n")
