"""Kimi K2: calls in a section of control marks; each has an id that contains its name, and its arguments as JSON."""

from __future__ import annotations

import re

from pyspec.text.markup.ahead import GAP, Lookahead
from pyspec.text.markup.between_marks import read_answer, read_section
from pyspec.text.markup.call_grammar import CallRules, Lark, concat, either, literal, repeated
from pyspec.text.markup.json_text import read_arguments
from pyspec.text.markup.reader import AnswerReader, Steps, Tools

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, SEP, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
PREFIX = "functions."
NAME_CHARS = 256

_NUMBER = re.compile(r":\d+$")
_WORD = re.compile(r"[^\s:]+")


def machine(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    def call(reader: AnswerReader, text: str) -> Steps[str]:
        id_, found = yield from reader.take_until(SEP, most=NAME_CHARS)
        name = _named(id_, tools)
        if not found or not name:
            return text + id_ + found
        reader.begin_call(name)
        yield from reader.take_spaces()
        yield from read_arguments(reader)
        yield from reader.skip_until(END_CALL)
        return ""

    def calls(reader: AnswerReader, mark: str) -> Steps[str]:
        return (yield from read_section(reader, mark, CALL, (CLOSE,), call))

    yield from read_answer(reader, (OPEN, CALL), calls, trims_start=trims_start)


def _named(id_: str, tools: Tools) -> str:
    """The name in an id; "" if there is none."""
    bare = id_.strip().removeprefix(PREFIX)
    name = _NUMBER.sub("", bare)
    if known := next((each for each in (name, bare) if each in tools), ""):
        return known
    return name if _WORD.fullmatch(name) else ""


def heads(tools: Tools) -> tuple[Lookahead, ...]:
    names = (*tools, *(PREFIX + name for name in tools))
    return ((OPEN,), GAP, (CALL,), GAP, names), ((CALL,), GAP, names)


def rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    options = [
        concat(literal(f"{PREFIX}{name}:"), "/[0-9]{1,4}/", literal(SEP), lark.json(schema))
        for name, schema in tools.items()
    ]
    call = lark.rule(concat(literal(CALL), either(options), literal(END_CALL)))
    return CallRules(OPEN, concat(repeated(call, "SPACE?", is_single=is_single), literal(CLOSE)))
