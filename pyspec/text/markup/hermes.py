"""Hermes and Qwen: each call is a JSON object between <tool_call> and </tool_call>."""

from __future__ import annotations

from pyspec.text.markup.ahead import GAP, Lookahead
from pyspec.text.markup.between_marks import read_answer
from pyspec.text.markup.call_grammar import CallRules, Lark, concat, literal, named_object, repeated
from pyspec.text.markup.call_object import read_call
from pyspec.text.markup.json_text import NotJson
from pyspec.text.markup.reader import AnswerReader, Steps, Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_KEYS = ('"arguments"', "'arguments'", '"parameters"', "'parameters'")


def machine(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    yield from read_answer(reader, (OPEN,), _call, trims_start=trims_start)


def _call(reader: AnswerReader, mark: str) -> Steps[str]:
    spaces = yield from reader.take_spaces()
    try:
        text = yield from read_call(reader)
    except NotJson:  # pass on the model's text, up to the end mark
        yield from reader.until((CLOSE,), reader.arguments)
        return ""
    if text is not None:
        return mark + spaces + text
    yield from reader.take_spaces()
    yield from reader.take_mark(CLOSE)
    return ""


def heads(tools: Tools) -> tuple[Lookahead, ...]:
    quote = ('"', "'")
    start: Lookahead = ((OPEN,), GAP, ("{",), GAP)
    name = (*start, ('"name"', "'name'"), GAP, (":",), GAP, quote, tuple(tools), quote, GAP)
    return (
        (*name, (",",), GAP, _KEYS),
        (*name, ("}",), GAP, (CLOSE,)),
        (*start, ('"arguments"', "'arguments'"), GAP, (":",)),
    )


def rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    body = named_object(lark, tools, "arguments", "")
    call = lark.rule(concat("SPACE?", body, "SPACE?", literal(CLOSE)))
    return CallRules(OPEN, repeated(call, concat("SPACE?", literal(OPEN)), is_single=is_single))
