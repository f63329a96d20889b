"""Calls as a list of JSON objects behind a mark: Nemotron's <TOOLCALL>[...]</TOOLCALL>, Firefunction's functools[...], and
<|tool_call|>[...] of Granite 3, behind which Phi-4 has an end mark."""

from __future__ import annotations

from functools import partial

from pyspec.text.markup.ahead import GAP, Lookahead
from pyspec.text.markup.between_marks import read_answer
from pyspec.text.markup.call_grammar import CallRules, Lark, concat, literal, named_object, repeated
from pyspec.text.markup.call_object import read_call
from pyspec.text.markup.json_text import NotJson
from pyspec.text.markup.reader import AnswerReader, Steps, Tools

OPEN, CLOSE = "<TOOLCALL>", "</TOOLCALL>"
FUNCTOOLS = "functools["
GRANITE, END_GRANITE = "<|tool_call|>", "<|/tool_call|>"


def machine(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    yield from read_answer(reader, (OPEN,), partial(_marked, CLOSE), trims_start=trims_start)


def granite(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    yield from read_answer(reader, (GRANITE,), partial(_marked, END_GRANITE), trims_start=trims_start)


def _marked(close: str, reader: AnswerReader, mark: str) -> Steps[str]:
    text = mark + (yield from reader.take_spaces())
    bracket = yield from reader.take_mark("[")
    try:
        content = yield from read_list(reader, bracket)
    except NotJson:  # pass on the model's text, up to the end mark
        yield from reader.until((close,), reader.arguments)
        return ""
    if content:
        return text + content
    yield from reader.take_spaces()
    yield from reader.take_mark(close)
    return ""


def functools(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    def calls(reader: AnswerReader, mark: str) -> Steps[str]:
        try:
            content = yield from read_list(reader, "[")
        except NotJson:
            yield from reader.rest(reader.arguments)
            return ""
        return content and mark.removesuffix("[") + content

    yield from read_answer(reader, (FUNCTOOLS,), calls, trims_start=trims_start)


def read_list(reader: AnswerReader, text: str) -> Steps[str]:
    """Read objects up to the bracket that closes the list. Returns text that is not a call, or "" if all of it was emitted.

    text  the text read so far: the list's bracket, or "" for a single object
    Raises NotJson if a call is malformed.
    """
    is_list = bool(text)
    text += yield from reader.take_spaces()
    if is_list and (yield from reader.take_mark("]")):
        return ""  # no calls
    while True:
        content = yield from read_call(reader)
        if content is not None:
            return text + content
        text = yield from reader.take_spaces()
        if not is_list or not (yield from reader.take_mark(",")):
            break
        text = "," + (yield from reader.take_spaces())
    yield from reader.take_mark("]")
    return ""


def heads(tools: Tools) -> tuple[Lookahead, ...]:
    return (((OPEN,), GAP, ("[",), GAP, *object_head(tools)),)


def granite_heads(tools: Tools) -> tuple[Lookahead, ...]:
    return (((GRANITE,), GAP, ("[",), GAP, *object_head(tools)),)


def functools_heads(tools: Tools) -> tuple[Lookahead, ...]:
    return (((FUNCTOOLS,), GAP, *object_head(tools)),)


def object_head(tools: Tools) -> Lookahead:
    """The start of a call that is an object with its name first."""
    quote = ('"', "'")
    key = (("{",), GAP, ('"name"', "'name'"), GAP, (":",), GAP)
    return (*key, quote, tuple(tools), quote, GAP, (",", "}"))


def rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    calls = _items(lark, tools, is_single=is_single)
    rest = concat("SPACE?", literal("["), calls, literal("]"), "SPACE?", literal(CLOSE))
    return CallRules(OPEN, rest)


def granite_rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    calls = _items(lark, tools, is_single=is_single)
    return CallRules(GRANITE, concat("SPACE?", literal("["), calls, literal("]")))


def functools_rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    return CallRules(FUNCTOOLS, concat(_items(lark, tools, is_single=is_single), literal("]")))


def _items(lark: Lark, tools: Tools, *, is_single: bool) -> str:
    call = lark.rule(named_object(lark, tools, "arguments", ""))
    return repeated(call, '"," SPACE?', is_single=is_single)
