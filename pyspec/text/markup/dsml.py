"""DeepSeek V3.2 and V4: invocations with one element for each argument, which is marked as a string or as JSON."""

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

WORD = "｜DSML｜"
OPEN = (f"<{WORD}tool_calls>", f"<{WORD}function_calls>")
CLOSE = (f"</{WORD}tool_calls>", f"</{WORD}function_calls>")
INVOKE, END_INVOKE = f'<{WORD}invoke name="', f"</{WORD}invoke>"
PARAMETER, END_PARAMETER = f'<{WORD}parameter name="', f"</{WORD}parameter>"
IS_TEXT, IS_JSON, BARE = '" string="true">', '" string="false">', '">'
MARKS = ValueMarks(
    end=END_PARAMETER.removesuffix("eter>"),
    constrained_end=f"{END_PARAMETER}\n",
    key=PARAMETER,
    key_end=((IS_TEXT, IS_JSON, BARE),),
    arguments_end=(END_INVOKE,),
    call_end=CLOSE,
    call=(OPEN, GAP, (INVOKE,)),
)
ARGUMENTS = ArgumentForm(
    key=PARAMETER,
    key_end="",
    end=MARKS.constrained_end,
    any_name=r'/[^<>"\s]{1,64}/',
    text=IS_TEXT,
    json=IS_JSON,
)


def machine(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    def call(reader: AnswerReader, text: str) -> Steps[str]:
        return (yield from read_named_call(reader, text, tools, BARE, MARKS, _key))

    def calls(reader: AnswerReader, mark: str) -> Steps[str]:
        return (yield from read_section(reader, mark, INVOKE, CLOSE, call))

    yield from read_answer(reader, OPEN, calls, trims_start=trims_start)


def _key(reader: AnswerReader, arguments: ArgumentWriter) -> Steps[ValueWriter | None]:
    ends = (IS_TEXT, IS_JSON, BARE)
    name, kind = yield from reader.take_name(arguments.names, *ends, most=NAME_CHARS)
    if not kind:
        return None
    return arguments.value(name, is_text={IS_TEXT: True, IS_JSON: False}.get(kind))


def heads(tools: Tools) -> tuple[Lookahead, ...]:
    return ((OPEN, GAP, (INVOKE,), tuple(tools), (BARE,)),)


def rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    options = []
    for name, schema in tools.items():
        head = literal(f"{INVOKE}{name}{BARE}\n")
        options.append(concat(head, ARGUMENTS.rules(lark, schema), literal(END_INVOKE)))
    call = lark.rule(concat("SPACE?", either(options)))
    calls = repeated(call, "", is_single=is_single)
    return CallRules(OPEN[0], concat(calls, "SPACE?", literal(CLOSE[0])))
