"""Qwen3-Coder, Qwen3.5, Nemotron 3: a call is <function=name> with one <parameter=name> for each argument, in <tool_call>.

Values are plain text in lines of their own. Nothing in them is escaped: a value ends where its end mark is followed by what may stand
behind a value, so that a text which speaks of this markup can be an argument.
"""

from __future__ import annotations

import re

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
from pyspec.text.markup.typed import ArgumentWriter, ValueWriter

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
NAME_CHARS = 256
NAME_OF_ANY = r'/[^<>\s]{1,64}/ ">\n"'  # in lark

_NAME = re.compile(r"[^<>\s]+")


def machine(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    def calls(reader: AnswerReader, mark: str) -> Steps[str]:
        text = mark
        if mark == OPEN:
            text += yield from reader.take_spaces()
            if not (yield from reader.take_mark(FUNCTION)):
                return text
            text += FUNCTION
        name, ok = yield from _name(reader)
        if not ok or (mark == FUNCTION and name not in tools):  # models leave the mark before it out at times
            return text + name + (">" if ok else "")
        reader.begin_call(name)
        yield from _arguments(reader, ArgumentWriter(reader, tools.get(name, {})))
        yield from reader.take_spaces()
        yield from reader.take_mark(CLOSE)
        return ""

    yield from read_answer(reader, (OPEN, FUNCTION), calls, trims_start=trims_start)


def _name(reader: AnswerReader) -> Steps[tuple[str, bool]]:
    """A name and whether it is one: it ends with ">", which is passed over."""
    name = ""
    while more := (yield from reader.take_while(_NAME, NAME_CHARS - len(name))):
        name += more
    if not name or not (yield from reader.take_mark(">")):
        return name, False
    return name, True


def _arguments(reader: AnswerReader, arguments: ArgumentWriter) -> Steps[None]:
    """Up to the end of the function. What stands between parameters and is none is left out."""
    while (mark := (yield from reader.until((PARAMETER, END_FUNCTION, CLOSE), _ignore))) == PARAMETER:
        name, ok = yield from _name(reader)
        if ok:
            value = arguments.value(name)
            if not (yield from _value(reader, value)):
                return  # cut off
            value.end()
    if mark:
        arguments.end()


def _ignore(text: str) -> None:
    pass


def _value(reader: AnswerReader, give: ValueWriter) -> Steps[bool]:
    """A value without the line ends around it. False if the answer ends before it does."""
    yield from reader.take_mark("\n")
    while True:
        # the line end before the mark is not the value's
        found = yield from reader.until(("\n" + END_PARAMETER, END_PARAMETER), give)
        if not found:
            return False
        spaces = yield from reader.take_spaces()
        if (yield from reader.look(PARAMETER, END_FUNCTION, CLOSE)) is not None:
            return True  # another one follows, or the call's end, or the answer's
        give(found + spaces)


def rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    options = []
    for name, schema in tools.items():
        head = literal(f"{FUNCTION}{name}>\n")
        options.append(row(head, _parameters(lark, schema), literal(END_FUNCTION)))
    call = lark.rule(row("SPACE?", either(options), "SPACE?", literal(CLOSE)))
    return CallRules(OPEN, repeated(call, row("SPACE?", literal(OPEN)), is_single=is_single))


def _parameters(lark: Lark, schema: Schema) -> str:
    """In the order of the schema. What it does not name is not written."""
    end, out = f"\n{END_PARAMETER}\n", []
    if takes_any(schema):
        return f"({row(literal(PARAMETER), NAME_OF_ANY, lark.text_before(end))})*"
    for name, own, is_needed in properties_of(schema):
        if words := words_of(own):
            value = row(either([literal(word) for word in words]), literal(end))
        elif is_text(schema, name):
            value = lark.text_before(end)
        else:
            value = row(lark.json(own), literal(end))
        rule = lark.rule(row(literal(f"{PARAMETER}{name}>\n"), value))
        out.append(rule if is_needed else f"{rule}?")
    return row(*out)
