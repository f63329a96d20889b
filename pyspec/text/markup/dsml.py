"""DeepSeek V3.2 and V4: invocations with one element for each argument, which is marked as a string or as JSON."""

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

WORD = "｜DSML｜"
OPEN = (f"<{WORD}tool_calls>", f"<{WORD}function_calls>")
CLOSE = (f"</{WORD}tool_calls>", f"</{WORD}function_calls>")
INVOKE, END_INVOKE = f'<{WORD}invoke name="', f"</{WORD}invoke>"
PARAMETER, END_PARAMETER = f'<{WORD}parameter name="', f"</{WORD}parameter>"
IS_TEXT, IS_JSON, BARE = '" string="true">', '" string="false">', '">'
NAME_CHARS = 256
MARKS = ValueMarks(
    end=END_PARAMETER.removesuffix("eter>"),
    held_end=f"{END_PARAMETER}\n",
    key=PARAMETER,
    key_end=((IS_TEXT, IS_JSON, BARE),),
    arguments_end=(END_INVOKE,),
    call_end=CLOSE,
    call=(OPEN, GAP, (INVOKE,)),
)
NAME_OF_ANY = r'/[^<>"\s]{1,64}/'  # lark for any argument's name


def machine(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    def calls(reader: AnswerReader, mark: str) -> Steps[str]:
        text = mark + (yield from reader.take_spaces())
        if not (yield from reader.take_mark(INVOKE)):
            return text
        text += INVOKE
        while True:
            name, found = yield from reader.take_name(tools, BARE, most=NAME_CHARS)
            if not (name and found):
                return text + name + found
            reader.begin_call(name)
            yield from _arguments(reader, ArgumentWriter(reader, tools.get(name, {})))
            yield from reader.take_spaces()
            if not (yield from reader.take_mark(INVOKE)):
                yield from reader.take_mark(*CLOSE)
                return ""
            text = INVOKE

    yield from read_answer(reader, OPEN, calls, trims_start=trims_start)


def _arguments(reader: AnswerReader, arguments: ArgumentWriter) -> Steps[None]:
    """Read arguments up to the end of the invocation. Other text between them is dropped."""
    while (mark := (yield from reader.until((PARAMETER, END_INVOKE, *CLOSE), _ignore))) == PARAMETER:
        name, kind = yield from reader.take_name(arguments.names, IS_TEXT, IS_JSON, BARE, most=NAME_CHARS)
        if not kind:
            continue
        value = arguments.value(name, is_text={IS_TEXT: True, IS_JSON: False}.get(kind))
        if not (yield from read_value(reader, MARKS, value, arguments.expected)):
            return  # cut off
        value.end()
    if mark:
        arguments.end()


def _ignore(text: str) -> None:
    pass


def heads(tools: Tools) -> tuple[Row, ...]:
    return ((OPEN, GAP, (INVOKE,), tuple(tools), (BARE,)),)


def rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    options = []
    for name, schema in tools.items():
        head = literal(f"{INVOKE}{name}{BARE}\n")
        options.append(row(head, _parameters(lark, schema), literal(END_INVOKE)))
    call = lark.rule(row("SPACE?", either(options)))
    return CallRules(OPEN[0], row(repeated(call, "", is_single=is_single), "SPACE?", literal(CLOSE[0])))


def _parameters(lark: Lark, schema: Schema) -> str:
    """The arguments in the schema's order, and no others."""
    end, out = MARKS.held_end, []
    if takes_any(schema):
        return f"({row(literal(PARAMETER), NAME_OF_ANY, literal(IS_TEXT), lark.text_before(end))})*"
    for name, own, is_needed in properties_of(schema):
        if words := words_of(own, MARKS.is_spelled):
            value = row(literal(IS_TEXT), either([literal(word) for word in words]), literal(end))
        elif is_text(schema, name):
            value = row(literal(IS_TEXT), lark.text_before(end))
        else:
            value = row(literal(IS_JSON), lark.json(own), literal(end))
        rule = lark.rule(row(literal(PARAMETER + name), value))
        out.append(rule if is_needed else f"{rule}?")
    return row(*out)
