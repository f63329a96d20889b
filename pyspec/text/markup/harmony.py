"""Harmony, the form of gpt-oss: an answer is a chain of messages, each with a channel and perhaps a recipient in its header.

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary<|message|>CONTENT<|end|>
    <|start|>assistant<|channel|>final<|message|>CONTENT<|return|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{ARGUMENTS}<|call|>

The recipient may stand before the channel, too. The prompt ends with the first `<|start|>assistant`. A call ends an answer, so there is one
at most. Calls of tools of the model's own (`python`, `browser.search`) are dropped unless a tool has that name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pyspec.text.markup.ahead import Step
from pyspec.text.markup.call_grammar import CallRules, Lark, concat, either, literal
from pyspec.text.markup.json_text import read_arguments
from pyspec.text.markup.prose import Syntax
from pyspec.text.markup.reader import AnswerReader, Emit, Steps, Tools
from pyspec.text.markup.reasoning import ThinkMarks

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MARKS = (CHANNEL, MESSAGE, START, END, CONSTRAIN)
PREFIX, TO = "functions.", " to="
NEXT = f"{START}assistant"
FINAL = f"{CHANNEL}final{MESSAGE}"
HEADER_CHARS = 512

HARMONY = ThinkMarks(f"{CHANNEL}analysis{MESSAGE}", END, marks=MARKS, content=FINAL, again=NEXT)

_FORMAT = concat('" "?', f"({literal(CONSTRAIN)})?", '"json"')
_HEADS = (CHANNEL, START, CONSTRAIN, MESSAGE, "to=")
_BREAKS = (END, RETURN, CALL, START, CHANNEL)
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"""(?:\bto\s*[=:]\s*["']?|(?<=commentary )(?=functions\.))([^\s<"']+)""")
_BEFORE, _AFTER = r"(?:(?:assistant|functions?)[.:_/]+)*", r"""(?=$|[\s<"':]|\.json)"""
_PEOPLE = ("user", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyCalls(Syntax):
    """Calls of Harmony. The end of a message ends reasoning, whatever follows, so no call's beginning does."""

    inner: Step = MARKS

    def bodies(self, lark: Lark, tools: Tools) -> list[str]:
        """From the name on: the recipient may stand in either place of the header."""
        channel = concat(literal(CHANNEL), either(['"commentary"', '"analysis"']))
        head = lark.rule(concat(f"({channel})?", f"({_FORMAT})?", literal(MESSAGE)))
        return [concat(literal(name), head, lark.json(schema)) for name, schema in tools.items()]

    def rules(self, lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
        return CallRules(f"{TO}{PREFIX}", either(self.bodies(lark, tools)))

    def read(
        self, reader: AnswerReader, tools: Tools, also: tuple[Syntax, ...], *, trims_start: bool
    ) -> Steps[None]:
        yield from read(reader, tools)


def read(
    reader: AnswerReader, tools: Tools | None, *, is_open: bool = False, is_shown: bool = False
) -> Steps[None]:
    """Read an answer. tools: None if calls are not parsed; is_open, is_shown: as of `ThoughtForm`."""
    chain = _Messages(reader, tools, is_shown)
    mark = END
    if is_open:
        mark = yield from chain.reasoning()
    while mark:
        mark = yield from chain.message(mark)


HARMONY_CALLS = HarmonyCalls()


class _Messages:
    """Reads messages one after the other."""

    def __init__(self, reader: AnswerReader, tools: Tools | None, is_shown: bool) -> None:
        self._reader, self._tools, self._is_shown = reader, tools, is_shown
        self._has_content = self._has_reasoning = False

    def message(self, mark: str) -> Steps[str]:
        """Read a message from its header on, behind `mark`. Returns the mark behind it; "" at the end of the answer."""
        reader, begun = self._reader, mark if mark == CHANNEL else ""
        if mark in (END, RETURN, CALL):
            begun = yield from reader.take_spaces()
            if (
                yield from reader.look(*_HEADS)
            ) is None:  # no header: the prompt has it, or the model left it out
                return (yield from self._content(begun))
        header, found = yield from reader.take_until(MESSAGE, RETURN, CALL, most=HEADER_CHARS)
        header = begun + header
        if found != MESSAGE:
            if len(header) >= HEADER_CHARS:
                return (yield from self._content(header))
            return found
        recipient = _recipient(header, self._tools or {})
        channel = (_CHANNEL.findall(header) or ["final"])[-1]  # now and then a stray one stands before
        if recipient and self._tools is not None:
            return (yield from self._called(recipient))
        if channel == "analysis" and not recipient:
            return (yield from self.reasoning())
        return (yield from self._content(""))

    def _content(self, begun: str) -> Steps[str]:
        """Content, of which `begun` is read. A blank line stands between messages."""
        if self._has_content:
            self._reader.content("\n\n")
        self._has_content = True
        self._reader.content(begun)
        return (yield from self.body(self._reader.content))

    def reasoning(self) -> Steps[str]:
        reader = self._reader
        if self._is_shown:
            reader.content(HARMONY.start)
            mark = yield from self.body(reader.content)
            reader.content(HARMONY.end if mark else "")
            return mark
        if self._has_reasoning:
            reader.reasoning("\n\n")
        self._has_reasoning = True
        return (yield from self.body(reader.reasoning))

    def body(self, emit: Emit) -> Steps[str]:
        """Pass on the text of a message up to its end."""
        return (yield from self._reader.until(_BREAKS, emit))

    def _called(self, recipient: str) -> Steps[str]:
        reader, tools = self._reader, self._tools or {}
        name = recipient if recipient in tools else recipient.removeprefix(PREFIX)
        if name != recipient or name in tools:
            reader.begin_call(name)
            yield from reader.take_spaces()
            yield from read_arguments(reader)
        return (yield from self.body(lambda text: None))


def _recipient(header: str, tools: Tools) -> str:
    """Of a message: a tool's name with its prefix, or another word; "" for none, or the user. Names may contain any characters."""
    found = _RECIPIENT.search(header)
    if found is None or found.group(1) in _PEOPLE:
        return ""
    text = header[found.start(1) :]
    for name in sorted(tools, key=len, reverse=True):
        if re.match(_BEFORE + re.escape(name) + _AFTER, text):
            return PREFIX + name
    return found.group(1)


def answer(
    lark: Lark, tools: Tools, *, body: str = "", is_calls_only: bool = False, is_open: bool = False
) -> str:
    """Lark of a whole answer: free messages, then a final one or a call.

    body     a rule that holds the text of the final message; "": it is free
    is_open  the answer begins inside reasoning
    """
    free = _until(lark, END)
    again = concat(literal(START), '"assistant"')
    channel = concat(literal(CHANNEL), either(['"analysis"', '"commentary"']), literal(MESSAGE))
    message = lark.rule(concat(channel, free, again))
    ends = []
    if not is_calls_only:
        head = concat(literal(CHANNEL), '"final"', f"({_FORMAT})?", literal(MESSAGE))
        ends.append(concat(head, body or "FREE?"))
    if tools:
        calls = HARMONY_CALLS.rules(lark, tools, is_single=True)
        begin = concat(literal(CHANNEL), either(['"commentary"', '"analysis"']))
        ends.append(concat(f"({begin})?", literal(calls.trigger), calls.rest))
    opened = concat(free, again) if is_open else ""
    return lark.whole(concat(opened, f"({message})*", either(ends)), FREE="/(?s:.+)/")


def _until(lark: Lark, mark: str) -> str:
    """Any text and the mark behind it, which free text can not contain if it is a control token."""
    return concat("FREE?", literal(mark)) if lark.is_control(mark) else lark.text_before(mark)
