"""GLM-4.5 and 4.6: a call is the function's name and pairs of <arg_key> and <arg_value>, in <tool_call>.

Strings are written bare, other values as JSON.
"""

from __future__ import annotations

import re

from pyspec.text.markup.ahead import GAP, NAME, Lookahead
from pyspec.text.markup.between_marks import read_answer
from pyspec.text.markup.call_grammar import (
    ArgumentForm,
    CallRules,
    Lark,
    concat,
    either,
    literal,
    repeated,
)
from pyspec.text.markup.reader import AnswerReader, Steps, Tools
from pyspec.text.markup.typed import ArgumentWriter, ValueWriter
from pyspec.text.markup.values import NAME_CHARS, ValueMarks, read_bare_arguments

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
MARKS = ValueMarks(
    end=END_VALUE.removesuffix(">"),
    constrained_end=f"{END_VALUE}\n",
    key=KEY,
    key_end=((END_KEY,), GAP, (VALUE,)),
    arguments_end=(CLOSE,),
    call_end=(),
    call=((OPEN,), NAME, GAP, (KEY, CLOSE)),
)
ARGUMENTS = ArgumentForm(
    key=KEY,
    key_end=f"{END_KEY}\n{VALUE}",
    end=MARKS.constrained_end,
    any_name=r"/[^<>\s]{1,64}/",
)

_NAME = re.compile(r"[^<>{}\s]+")


def machine(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    def calls(reader: AnswerReader, mark: str) -> Steps[str]:
        text = mark + (yield from reader.take_spaces())
        name = yield from reader.take_word(tools, (KEY, CLOSE), _NAME, NAME_CHARS)
        text += name + (yield from reader.take_spaces())
        if not name or not (yield from reader.look(KEY, CLOSE)):
            return text
        reader.begin_call(name)
        arguments = ArgumentWriter(reader, tools.get(name, {}))
        yield from read_bare_arguments(reader, MARKS, arguments, _key)
        return ""

    yield from read_answer(reader, (OPEN,), calls, trims_start=trims_start)


def _key(reader: AnswerReader, arguments: ArgumentWriter) -> Steps[ValueWriter | None]:
    name, found = yield from reader.take_name(arguments.names, END_KEY, most=NAME_CHARS)
    yield from reader.take_spaces()
    if not found or not (yield from reader.take_mark(VALUE)):
        return None
    return arguments.value(name if name in arguments.names else name.strip())


def heads(tools: Tools) -> tuple[Lookahead, ...]:
    return (((OPEN,), GAP, tuple(tools), GAP, (KEY, CLOSE)),)


def rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    options = [concat(literal(f"{name}\n"), ARGUMENTS.rules(lark, tools[name])) for name in tools]
    call = lark.rule(concat("SPACE?", either(options), literal(CLOSE)))
    return CallRules(OPEN, repeated(call, concat("SPACE?", literal(OPEN)), is_single=is_single))
