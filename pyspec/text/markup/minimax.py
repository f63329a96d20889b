"""MiniMax M2: invocations with one element for each argument; strings are written bare, other values as JSON."""

from __future__ import annotations

from pyspec.text.markup.ahead import GAP, Lookahead
from pyspec.text.markup.between_marks import read_answer, read_section
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
from pyspec.text.markup.values import NAME_CHARS, ValueMarks, read_named_call

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, END_INVOKE = '<invoke name="', "</invoke>"
PARAMETER, END_PARAMETER = '<parameter name="', "</parameter>"
END_NAME = '">'
MARKS = ValueMarks(
    end="</param",
    constrained_end=f"{END_PARAMETER}\n",
    key=PARAMETER,
    key_end=((END_NAME,),),
    arguments_end=(END_INVOKE,),
    call_end=(CLOSE,),
    call=((OPEN,), GAP, (INVOKE,)),
)
ARGUMENTS = ArgumentForm(
    key=PARAMETER, key_end=END_NAME, end=MARKS.constrained_end, any_name=r'/[^<>"\s]{1,64}/'
)


def machine(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    def call(reader: AnswerReader, text: str) -> Steps[str]:
        return (yield from read_named_call(reader, text, tools, END_NAME, MARKS, _key))

    def calls(reader: AnswerReader, mark: str) -> Steps[str]:
        return (yield from read_section(reader, mark, INVOKE, (CLOSE,), call))

    yield from read_answer(reader, (OPEN,), calls, trims_start=trims_start)


def _key(reader: AnswerReader, arguments: ArgumentWriter) -> Steps[ValueWriter | None]:
    name, found = yield from reader.take_name(arguments.names, END_NAME, most=NAME_CHARS)
    return arguments.value(name) if found else None


def heads(tools: Tools) -> tuple[Lookahead, ...]:
    return (((OPEN,), GAP, (INVOKE,), tuple(tools), (END_NAME,)),)


def rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    options = []
    for name, schema in tools.items():
        head = literal(f"{INVOKE}{name}{END_NAME}\n")
        options.append(concat(head, ARGUMENTS.rules(lark, schema), literal(END_INVOKE)))
    call = lark.rule(concat("SPACE?", either(options)))
    return CallRules(OPEN, concat(repeated(call, "", is_single=is_single), "SPACE?", literal(CLOSE)))
