"""Qwen3-Coder, Qwen3.5, Nemotron 3: a call is <function=name> with one <parameter=name> for each argument, in <tool_call>.

Values are plain text on lines of their own, without any escapes.
"""

from __future__ import annotations

from pyspec.text.markup.ahead import GAP, Lookahead
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
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
MARKS = ValueMarks(
    end="</param",
    constrained_end=f"\n{END_PARAMETER}\n",
    key=PARAMETER,
    key_end=((">",),),
    arguments_end=(END_FUNCTION,),
    call_end=(CLOSE,),
    call=((OPEN,), GAP, (FUNCTION,)),
)
ARGUMENTS = ArgumentForm(
    key=PARAMETER,
    key_end=">\n",
    end=MARKS.constrained_end,
    any_name=r"/[^<>\s]{1,64}/",
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
        # some models leave out OPEN: only tools then
        is_unknown = mark == FUNCTION and name not in tools
        if not name or not found or is_unknown:
            return text + name + found
        reader.begin_call(name)
        arguments = ArgumentWriter(reader, tools.get(name, {}))
        yield from read_bare_arguments(reader, MARKS, arguments, _key)
        yield from reader.take_spaces()
        yield from reader.take_mark(CLOSE)
        return ""

    yield from read_answer(reader, (OPEN, FUNCTION), calls, trims_start=trims_start)


def _key(reader: AnswerReader, arguments: ArgumentWriter) -> Steps[ValueWriter | None]:
    name, found = yield from reader.take_name(arguments.names, ">", most=NAME_CHARS)
    if not found:
        return None
    value = arguments.value(name)
    yield from reader.take_mark("\n")
    return value


def heads(tools: Tools) -> tuple[Lookahead, ...]:
    call: Lookahead = ((FUNCTION,), tuple(tools), (">",))
    return ((OPEN,), GAP, *call), (*call, GAP, (PARAMETER, END_FUNCTION))


def rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    options = []
    for name, schema in tools.items():
        head = literal(f"{FUNCTION}{name}>\n")
        options.append(concat(head, ARGUMENTS.rules(lark, schema), literal(END_FUNCTION)))
    call = lark.rule(concat("SPACE?", either(options), "SPACE?", literal(CLOSE)))
    return CallRules(OPEN, repeated(call, concat("SPACE?", literal(OPEN)), is_single=is_single))
