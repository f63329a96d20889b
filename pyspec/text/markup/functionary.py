"""Functionary v3.1: each call is <function=name>, its arguments as JSON, and </function>."""

from __future__ import annotations

from pyspec.text.markup.ahead import GAP, Lookahead
from pyspec.text.markup.between_marks import read_answer
from pyspec.text.markup.call_grammar import CallRules, Lark, concat, either, literal, repeated
from pyspec.text.markup.json_text import read_arguments
from pyspec.text.markup.reader import AnswerReader, Steps, Tools

FUNCTION, CLOSE = "<function=", "</function>"
NAME_CHARS = 256


def machine(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    def calls(reader: AnswerReader, mark: str) -> Steps[str]:
        name, found = yield from reader.take_name(tools, ">", most=NAME_CHARS)
        text = mark + name + found + (yield from reader.take_spaces())
        if not found or name not in tools or (yield from reader.peek()) != "{":
            return text
        reader.begin_call(name)
        yield from read_arguments(reader)
        yield from reader.skip_until(CLOSE)
        return ""

    yield from read_answer(reader, (FUNCTION,), calls, trims_start=trims_start)


def heads(tools: Tools) -> tuple[Lookahead, ...]:
    return (((FUNCTION,), tuple(tools), (">",), GAP, ("{",)),)


def rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    end, between = literal(CLOSE), concat("SPACE?", literal(FUNCTION))
    options = [concat(literal(f"{name}>"), lark.json(tools[name]), end) for name in tools]
    call = lark.rule(either(options))
    return CallRules(FUNCTION, repeated(call, between, is_single=is_single))
