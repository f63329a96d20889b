"""GLM-4.5 and 4.6: a call is the function's name and pairs of <arg_key> and <arg_value>, in <tool_call>.

Strings are written bare, other values as JSON.
"""

from __future__ import annotations

import re

from pyspec.text.markup.ahead import GAP, NAME, Row
from pyspec.text.markup.between_marks import read_answer
from pyspec.text.markup.call_grammar import (
    CallRules,
    Lark,
    Schema,
    either,
    is_text,
    literal,
    properties_of,
    repeated,
    row,
    takes_any,
    words_of,
)
from pyspec.text.markup.reader import AnswerReader, Steps, Tools
from pyspec.text.markup.typed import ArgumentWriter
from pyspec.text.markup.values import ValueMarks, read_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
NAME_CHARS = 256
MARKS = ValueMarks(
    end=END_VALUE.removesuffix(">"),
    held_end=f"{END_VALUE}\n",
    key=KEY,
    key_end=((END_KEY,), GAP, (VALUE,)),
    arguments_end=(CLOSE,),
    call_end=(),
    call=((OPEN,), NAME, GAP, (KEY, CLOSE)),
)
KEY_OF_ANY = r"/[^<>\s]{1,64}/"  # lark for any argument's name

_NAME = re.compile(r"[^<>{}\s]+")


def machine(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    def calls(reader: AnswerReader, mark: str) -> Steps[str]:
        text = mark + (yield from reader.take_spaces())
        name = yield from reader.take_word(tools, (KEY, CLOSE), _NAME, NAME_CHARS)
        text += name + (yield from reader.take_spaces())
        if not name or not (yield from reader.look(KEY, CLOSE)):
            return text
        reader.begin_call(name)
        yield from _arguments(reader, ArgumentWriter(reader, tools.get(name, {})))
        return ""

    yield from read_answer(reader, (OPEN,), calls, trims_start=trims_start)


def _arguments(reader: AnswerReader, arguments: ArgumentWriter) -> Steps[None]:
    """Read arguments up to the end of the call. Other text between them is dropped."""
    while (mark := (yield from reader.until((KEY, CLOSE), _ignore))) == KEY:
        name, found = yield from reader.take_name(arguments.names, END_KEY, most=NAME_CHARS)
        yield from reader.take_spaces()
        if not found or not (yield from reader.take_mark(VALUE)):
            continue
        value = arguments.value(name if name in arguments.names else name.strip())
        if not (yield from read_value(reader, MARKS, value, arguments.expected)):
            return  # cut off
        value.end()
    if mark:
        arguments.end()


def _ignore(text: str) -> None:
    pass


def heads(tools: Tools) -> tuple[Row, ...]:
    return (((OPEN,), GAP, tuple(tools), GAP, (KEY, CLOSE)),)


def rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    options = [row(literal(f"{name}\n"), _pairs(lark, schema)) for name, schema in tools.items()]
    call = lark.rule(row("SPACE?", either(options), literal(CLOSE)))
    return CallRules(OPEN, repeated(call, row("SPACE?", literal(OPEN)), is_single=is_single))


def _pairs(lark: Lark, schema: Schema) -> str:
    """The arguments in the schema's order, and no others."""
    end, out = MARKS.held_end, []
    if takes_any(schema):
        return f"({row(literal(KEY), KEY_OF_ANY, literal(f'{END_KEY}{chr(10)}{VALUE}'), lark.text_before(end))})*"
    for name, own, is_needed in properties_of(schema):
        if words := words_of(own, MARKS.is_spelled):
            value = row(either([literal(word) for word in words]), literal(end))
        elif is_text(schema, name):
            value = lark.text_before(end)
        else:
            value = row(lark.json(own), literal(end))
        rule = lark.rule(row(literal(f"{KEY}{name}{END_KEY}\n{VALUE}"), value))
        out.append(rule if is_needed else f"{rule}?")
    return row(*out)
