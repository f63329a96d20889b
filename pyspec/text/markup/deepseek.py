"""DeepSeek V3, R1 and V3.1: calls between marks of full-width bars, their arguments as JSON.

V3 and R1 write a kind, the name and a fenced block of JSON. V3.1 writes the name and the JSON.
"""

from __future__ import annotations

from pyspec.text.markup.ahead import GAP, Lookahead
from pyspec.text.markup.between_marks import read_answer, read_section
from pyspec.text.markup.call_grammar import CallRules, Lark, concat, either, literal, repeated
from pyspec.text.markup.json_text import read_arguments
from pyspec.text.markup.reader import AnswerReader, Steps, Tools

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"
NAME_CHARS = 256


def machine(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    yield from read_answer(reader, (OPEN, CALL), _calls, trims_start=trims_start)


def _calls(reader: AnswerReader, mark: str) -> Steps[str]:
    return (yield from read_section(reader, mark, CALL, (CLOSE,), _call))


def _call(reader: AnswerReader, text: str) -> Steps[str]:
    """Read one call; `text` is its text so far. Returns its text if it is not a call, else ""."""
    name, found = yield from reader.take_until(SEP, most=NAME_CHARS)
    text += name + found
    if not found:
        return text
    text += yield from reader.take_spaces()
    if (yield from reader.peek()) != "{":  # the word before was its kind
        name, found = yield from reader.take_until("\n", most=NAME_CHARS)
        text += name + found
        if not found:
            return text
    if not name.strip():
        return text
    reader.begin_call(name.strip())
    yield from _arguments(reader)
    yield from reader.skip_until(END_CALL)
    return ""


def _arguments(reader: AnswerReader) -> Steps[None]:
    yield from reader.take_spaces()
    if (yield from reader.take_mark(FENCE)):
        yield from reader.take_until("\n", most=NAME_CHARS)
        yield from reader.take_spaces()
    yield from read_arguments(reader)


def heads(tools: Tools) -> tuple[Lookahead, ...]:
    names = (*tools, "function")
    return ((OPEN,), GAP, (CALL,), GAP, names, (SEP,)), ((CALL,), GAP, names, (SEP,))


def rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    """Both forms of the arguments: each model knows its own."""
    options = []
    for name, schema in tools.items():
        arguments = lark.json(schema)
        options.append(concat(literal(name + SEP), arguments, literal(END_CALL)))
        head, tail = f"function{SEP}{name}\n{FENCE}json\n", f"\n{FENCE}{END_CALL}"
        options.append(concat(literal(head), arguments, literal(tail)))
    call = lark.rule(concat(literal(CALL), either(options)))
    return CallRules(OPEN, concat(repeated(call, "SPACE?", is_single=is_single), literal(CLOSE)))
