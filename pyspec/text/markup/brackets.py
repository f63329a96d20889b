"""Mistral's models: [TOOL_CALLS] before a list of objects (7B v0.3, Nemo, Small 3.1), or before each call as its name, [ARGS] and JSON (Devstral, Small 3.2).

Their templates want ids of nine letters and digits. An id that the model writes before the arguments is used; one behind them comes too late.
"""

from __future__ import annotations

import re
import secrets
import string

from pyspec.text.markup.ahead import GAP, Lookahead
from pyspec.text.markup.between_marks import read_answer
from pyspec.text.markup.call_grammar import (
    CallRules,
    Lark,
    concat,
    either,
    literal,
    named_object,
    repeated,
)
from pyspec.text.markup.call_list import object_head, read_list
from pyspec.text.markup.json_text import NotJson, read_arguments
from pyspec.text.markup.reader import AnswerReader, Steps, Tools

OPEN, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAME_CHARS = 256
ID_CHARS = 9
ID_IN_LARK = f"/[A-Za-z0-9]{{{ID_CHARS}}}/"

_NAME = re.compile(r"[^\s\[\]{}<>\"]+")
_ID = re.compile(rf"[A-Za-z0-9]{{{ID_CHARS}}}")
_ALPHABET = string.ascii_letters + string.digits


def new_id() -> str:
    """An id in the form that these models' templates want."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(ID_CHARS))


def machine(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    def calls(reader: AnswerReader, mark: str) -> Steps[str]:
        text = mark + (yield from reader.take_spaces())
        if (yield from reader.look("[", "{")):
            return (yield from _list(reader, text))
        return (yield from _call(reader, tools, text))

    yield from read_answer(reader, (OPEN,), calls, trims_start=trims_start)


def _list(reader: AnswerReader, text: str) -> Steps[str]:
    try:
        content = yield from read_list(reader, (yield from reader.take_mark("[")))
    except NotJson:  # pass on the model's text
        yield from reader.rest(reader.arguments)
        return ""
    return content and text + content


def _call(reader: AnswerReader, tools: Tools, text: str) -> Steps[str]:
    """Read a name, an optional id, and the arguments."""
    name = yield from reader.take_word(tools, (ARGS, ID, "{"), _NAME, NAME_CHARS)
    text += name + (yield from reader.take_spaces())
    id_ = ""
    if (yield from reader.take_mark(ID)):
        text += ID + (id_ := (yield from reader.take_word((), (ARGS,), _NAME, NAME_CHARS)))
    args = yield from reader.take_mark(ARGS)
    text += args + (yield from reader.take_spaces())
    is_object = (yield from reader.peek()) == "{"
    if not name or not (args or (is_object and name in tools)):
        return text
    reader.begin_call(name, id_ if _ID.fullmatch(id_) else "")
    yield from read_arguments(reader)
    return ""


def heads(tools: Tools) -> tuple[Lookahead, ...]:
    names = tuple(tools)
    in_list = ((OPEN,), GAP, ("[",), GAP, *object_head(tools))
    return in_list, ((OPEN,), GAP, names, GAP, (ARGS, ID, "{"))


def rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    own_id = concat(literal(', "id": "'), ID_IN_LARK, literal('"'))
    end = concat(f"({own_id})?", literal("}"))
    call = lark.rule(named_object(lark, tools, "arguments", "", end=end))
    calls = repeated(call, '"," SPACE?', is_single=is_single)
    return CallRules(OPEN, concat("SPACE?", literal("["), calls, literal("]")))


def args_rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    own_id = concat(literal(ID), ID_IN_LARK)
    middle = concat(f"({own_id})?", literal(ARGS))
    options = [concat(literal(name), middle, lark.json(tools[name])) for name in tools]
    call = lark.rule(either(options))
    return CallRules(OPEN, repeated(call, literal(OPEN), is_single=is_single))
