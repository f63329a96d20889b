"""LFM2: calls in the form of Python, [f(a="x", b=2), g()], between control marks. Some answers have JSON objects there instead.

Arguments have their names before them. Values are Python's or JSON's.
"""

from __future__ import annotations

import re

from pyspec.text.markup.ahead import GAP, Lookahead
from pyspec.text.markup.between_marks import read_answer
from pyspec.text.markup.call_grammar import (
    CallRules,
    Lark,
    Schema,
    concat,
    either,
    listed,
    literal,
    properties_of,
    repeated,
    takes_any,
)
from pyspec.text.markup.call_list import object_head, read_list
from pyspec.text.markup.json_text import NotJson, read_value
from pyspec.text.markup.reader import AnswerReader, Steps, Tools
from pyspec.text.markup.typed import ArgumentWriter, types_of

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
NAME_CHARS = 256
ANY_VALUE = {"type": ["string", "number", "boolean", "array", "object", "null"]}
WORDS = either([literal(word) for word in ("True", "False", "true", "false")])

_NAME = re.compile(r"[^\s\[\](){}<>\"',=]+")


def machine(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    def calls(reader: AnswerReader, mark: str) -> Steps[str]:
        text = mark + (yield from reader.take_spaces())
        text += yield from reader.take_mark("[")
        text += yield from reader.take_spaces()
        try:
            if (yield from reader.peek()) == "{":
                content = yield from read_list(reader, "[")
            else:
                content = yield from _calls(reader, tools)
        except NotJson:  # pass on the model's text, up to the end mark
            yield from reader.until((CLOSE,), reader.arguments)
            return ""
        if content:
            return text.removesuffix("[") + content if content.startswith("[") else text + content
        yield from reader.take_spaces()
        yield from reader.take_mark(CLOSE)
        return ""

    yield from read_answer(reader, (OPEN,), calls, trims_start=trims_start)


def _calls(reader: AnswerReader, tools: Tools) -> Steps[str]:
    """Read calls up to the bracket that closes the list. Returns text that is not a call, or "". NotJson: a call is malformed."""
    if (yield from reader.take_mark("]")):
        return ""
    while True:
        name, found = yield from reader.take_name(tools, "(", most=NAME_CHARS)
        if not found or (name not in tools and not _NAME.fullmatch(name)):
            return name + found
        reader.begin_call(name)
        yield from _arguments(reader, ArgumentWriter(reader, tools.get(name, {})))
        yield from reader.take_spaces()
        if not (yield from reader.take_mark(",")):
            break
        yield from reader.take_spaces()
    yield from reader.take_mark("]")
    return ""


def _arguments(reader: AnswerReader, arguments: ArgumentWriter) -> Steps[None]:
    """Read NAME=VALUE up to the bracket that closes the call."""
    known: Lookahead = (tuple(arguments.names), ("=",))
    while True:
        if not (yield from reader.sees(known, cut_fits=False)):  # names may begin with a space
            yield from reader.drop_spaces()
        if (yield from reader.take_mark(")")):
            break
        name, found = yield from reader.take_name(arguments.names, "=", ")", most=NAME_CHARS)
        if found != "=":
            reader.arguments(name + found)
            raise NotJson
        arguments.name(name if name in arguments.names else name.strip())
        yield from reader.drop_spaces()
        yield from read_value(reader, reader.arguments)
        yield from reader.drop_spaces()
        if (yield from reader.take_mark(",")):
            yield from reader.take_mark(" ")
        elif (yield from reader.peek()) != ")":
            raise NotJson
    arguments.end()


def heads(tools: Tools) -> tuple[Lookahead, ...]:
    start: Lookahead = ((OPEN,), GAP, ("[",), GAP)
    return (*start, tuple(tools), ("(",)), (*start, *object_head(tools))


def rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    options = [
        concat(literal(f"{name}("), _named(lark, schema), literal(")")) for name, schema in tools.items()
    ]
    calls = repeated(lark.rule(either(options)), literal(", "), is_single=is_single)
    return CallRules(OPEN, concat(literal("["), calls, literal("]"), literal(CLOSE)))


def _named(lark: Lark, schema: Schema) -> str:
    """Lark for the arguments in the schema's order, with commas between those that are there."""
    if takes_any(schema):
        pair = lark.rule(concat(r"/[^\s=(),]{1,64}/", literal("="), lark.json(ANY_VALUE)))
        return f"({repeated(pair, literal(', '), is_single=False)})?"
    pairs = []
    for name, own, is_needed in properties_of(schema):
        is_word = types_of(schema, name) == {"boolean"} and not own.keys() & {"const", "enum"}
        pairs.append((concat(literal(f"{name}="), WORDS if is_word else lark.json(own)), is_needed))
    return listed(lark, pairs, ", ")
