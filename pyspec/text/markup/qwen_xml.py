"""Qwen3-Coder, Qwen3.5, Nemotron 3: a call is <function=name> with one <parameter=name> for each argument, in <tool_call>.

Values are plain text on lines of their own, without any escapes.
"""

from __future__ import annotations

from pyspec.text.markup.ahead import GAP, Row
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
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
NAME_CHARS = 256
NAME_OF_ANY = r'/[^<>\s]{1,64}/ ">\n"'  # lark for any argument's name

MARKS = ValueMarks(
    end="</param",
    held_end=f"\n{END_PARAMETER}\n",
    key=PARAMETER,
    key_end=((">",),),
    arguments_end=(END_FUNCTION,),
    call_end=(CLOSE,),
    call=((OPEN,), GAP, (FUNCTION,)),
)


def machine(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    def calls(reader: AnswerReader, mark: str) -> Steps[str]:
        text = mark
        if mark == OPEN:
            text += yield from reader.take_spaces()
            if not (yield from reader.take_mark(FUNCTION)):
                return text
            text += FUNCTION
        name, found = yield from reader.take_name(tools, ">", most=NAME_CHARS)
        if (
            not name or not found or (mark == FUNCTION and name not in tools)
        ):  # some models leave out OPEN; then only a tool's name makes a call
            return text + name + found
        reader.begin_call(name)
        yield from _arguments(reader, ArgumentWriter(reader, tools.get(name, {})))
        yield from reader.take_spaces()
        yield from reader.take_mark(CLOSE)
        return ""

    yield from read_answer(reader, (OPEN, FUNCTION), calls, trims_start=trims_start)


def _arguments(reader: AnswerReader, arguments: ArgumentWriter) -> Steps[None]:
    """Read arguments up to the end of the function. Other text between them is dropped."""
    while (mark := (yield from reader.until((PARAMETER, END_FUNCTION, CLOSE), _ignore))) == PARAMETER:
        name, found = yield from reader.take_name(arguments.names, ">", most=NAME_CHARS)
        if found:
            value = arguments.value(name)
            yield from reader.take_mark("\n")
            if not (yield from read_value(reader, MARKS, value, arguments.expected)):
                return  # cut off
            value.end()
    if mark:
        arguments.end()


def _ignore(text: str) -> None:
    pass


def heads(tools: Tools) -> tuple[Row, ...]:
    call: Row = ((FUNCTION,), tuple(tools), (">",))
    return ((OPEN,), GAP, *call), (*call, GAP, (PARAMETER, END_FUNCTION))


def rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    options = []
    for name, schema in tools.items():
        head = literal(f"{FUNCTION}{name}>\n")
        options.append(row(head, _parameters(lark, schema), literal(END_FUNCTION)))
    call = lark.rule(row("SPACE?", either(options), "SPACE?", literal(CLOSE)))
    return CallRules(OPEN, repeated(call, row("SPACE?", literal(OPEN)), is_single=is_single))


def _parameters(lark: Lark, schema: Schema) -> str:
    """The arguments in the schema's order, and no others."""
    end, out = MARKS.held_end, []
    if takes_any(schema):
        return f"({row(literal(PARAMETER), NAME_OF_ANY, lark.text_before(end))})*"
    for name, own, is_needed in properties_of(schema):
        if words := words_of(own, MARKS.is_spelled):
            value = row(either([literal(word) for word in words]), literal(end))
        elif is_text(schema, name):
            value = lark.text_before(end)
        else:
            value = row(lark.json(own), literal(end))
        rule = lark.rule(row(literal(f"{PARAMETER}{name}>\n"), value))
        out.append(rule if is_needed else f"{rule}?")
    return row(*out)
