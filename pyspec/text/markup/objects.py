"""Calls as JSON objects, {"name": ..., "arguments": {...}}, one or a list of them between marks.

Hermes and Qwen write one in <tool_call>, Llama 3 one alone; Nemotron a list in <TOOLCALL>, Granite one behind <|tool_call|> (Phi-4 with an end mark),
Firefunction behind functools, Mistral's older models behind [TOOL_CALLS], each call with an id of nine letters and digits. Cohere's lists
between <|START_ACTION|> and <|END_ACTION|> have other keys, and a number before the name.
"""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import dataclass

from pyspec.text.markup.ahead import GAP, WORD, Lookahead, Names, Step
from pyspec.text.markup.call_grammar import CallRules, Lark, Schema, concat, either, literal
from pyspec.text.markup.json_text import NotJson, as_object, read_string, read_value, take
from pyspec.text.markup.prose import Syntax
from pyspec.text.markup.reader import HELD_CHARS, NO_LIMIT, AnswerReader, Steps, Tools, offered
from pyspec.text.markup.typed import WRAPPERS, names_of
from pyspec.text.schemas import closed

ARGUMENTS = ("arguments", "parameters")
NAMES = ("name", "function", "tool", "tool_name")  # other keys than the first hold an offered name
BETWEEN = frozenset(" \t\r\n,;]}")  # of objects: separators, and brackets that close nothing
ID_CHARS = 9
ID_IN_LARK = f"/[A-Za-z0-9]{{{ID_CHARS}}}/"

_ALPHABET = string.ascii_letters + string.digits
_QUOTE = ('"', "'")


def new_id() -> str:
    """An id in the form that Mistral's templates want."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(ID_CHARS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects(Syntax):
    """The marks around the objects; with `is_section` these are a list.

    is_known   only offered tools are called: another dialect's answer
    has_ids    each object ends with an id
    keys       of an object: before its name's number, if it has one; of its name, and of its arguments
    """

    is_known: bool = False
    has_ids: bool = False
    keys: tuple[str, str, str] = ("", "name", "arguments")

    @property
    def ends(self) -> Step:
        return tuple(mark.rstrip(">") if mark.startswith("</") else mark for mark in self.close)

    def call(
        self, reader: AnswerReader, tools: Tools, *, opened: str, is_open: bool
    ) -> Steps[str | None]:
        fences: Step = ("```json", "```")
        first: Lookahead = ((*fences, ""), GAP)
        begins: tuple[Lookahead, ...] = ((*first, ("{",)), (*first, ("[",), GAP, ("{", "]")))
        if not (opened or self.bare) or not (yield from reader.sees(*begins)):
            return None
        reader.hold()
        fence = yield from reader.take((fences, GAP))
        text = yield from read_objects(
            reader, tools, is_known=self.is_known or not opened, key=self.keys[1]
        )
        yield from reader.take(*((GAP, ("```",)) for _ in (fence,) if fence and not text))
        return text

    def heads(self, tools: Tools) -> tuple[Lookahead, ...]:
        start: Lookahead = (self.open, GAP, ("[", "") if self.is_section and self.first else ("",), GAP)
        if self.is_section:
            number, key, _ = self.keys
            numbers = (number, "") if number else ("",)
            return tuple((*start, *object_head(tools, key, each)) for each in numbers)
        keys = tuple(f"{quote}{key}{quote}" for key in ARGUMENTS for quote in _QUOTE)
        name = (*start, *object_head(tools)[:-1])
        return (
            (*name, (",",), GAP, keys),
            (*name, ("}",), GAP, self.close),
            (*start, ("{",), GAP, keys, GAP, (":",)),
        )

    def bodies(self, lark: Lark, tools: Tools) -> list[str]:
        own_id = concat(literal(', "id": "'), ID_IN_LARK, literal('"'))
        end = concat(f"({own_id})?", literal("}")) if self.has_ids else literal("}")
        number, key, arguments = self.keys
        begin = concat(literal(f'{{"{number}": "'), "/[0-9]{1,4}/") if number else ""
        heads = (json.dumps({key: name, arguments: 0}, ensure_ascii=False) for name in tools)
        return [
            concat(
                begin, literal('", ' + head[1:-2] if begin else head[:-2]), lark.json(tools[name]), end
            )
            for name, head in zip(tools, heads, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BareObjects(Objects):
    """Llama: a call is an answer that is an object with "name" and "parameters", or a list of such, bare or behind a mark.

    A bare object is a call only if it names an offered tool, because answers in JSON look alike.
    """

    bare: Step = ("{", "[")

    def heads(self, tools: Tools) -> tuple[Lookahead, ...]:
        return ((self.open, GAP, self.bare),)

    def rules(self, lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
        """One call, because templates of these models know no more."""
        begin, calls = '{"name": "', []
        for name, schema in tools.items():
            head = json.dumps({"name": name, "parameters": 0}, ensure_ascii=False)[:-2]
            calls.append(concat(literal(head.removeprefix(begin)), lark.json(schema), '"}"'))
        return CallRules(begin, either(calls))


def as_schema(tools: Tools) -> Schema:
    """A call of Llama 3 as a JSON Schema. Beside other JSON, a literal for its start would be one lexeme, and the lexer could not choose.

    References of each tool's schema lead into that schema, because it has an address of its own."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "parameters": {"$id": f"http://tools/{i}", "type": "object", **closed(schema)},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, (name, schema) in enumerate(tools.items())
    ]
    return {"anyOf": calls}


def in_list(open_: Step, close: Step) -> Objects:
    """A list of objects between these marks."""
    first, last = concat("SPACE?", literal("[")), literal("]")
    return Objects(
        open=open_, close=close, is_section=True, first=first, between='"," SPACE?', last=last, lead=""
    )


def object_head(tools: Tools, key: str = "name", number: str = "") -> Lookahead:
    """The start of a call that is an object with its name first, or behind a number."""

    def begins(key: str) -> Lookahead:
        return (tuple(f"{quote}{key}{quote}" for quote in _QUOTE), GAP, (":",), GAP)

    first: Lookahead = (*begins(number), (*_QUOTE, ""), WORD, (*_QUOTE, ""), GAP, (",",), GAP)
    name: Lookahead = (*begins(key), _QUOTE, Names(tools), _QUOTE, GAP, (",", "}"))
    return (("{",), GAP, *(first if number else ()), *name)


def read_objects(reader: AnswerReader, tools: Tools, *, is_known: bool, key: str) -> Steps[str]:
    """Read objects, and what stands between and behind them. Returns held text that is not a call, or "" if all of it was emitted.

    is_known  only offered tools are called
    key       of names
    A call that is malformed behind its name gets the model's text up to an end mark as its arguments.
    """
    is_list, n_calls = bool((yield from reader.take_mark("["))), reader.n_calls
    yield from reader.take_spaces()
    while (yield from reader.peek()) == "{":
        try:
            if not (yield from read_call(reader, tools, is_known=is_known, key=key)):
                return reader.held()
        except NotJson:
            yield from reader.find(reader.ends, reader.arguments)
            return ""
        while (char := (yield from reader.peek())) and char in BETWEEN:
            reader.skip(1)
        reader.hold()
    is_empty = is_list and reader.n_calls == n_calls and not is_known
    if is_empty and (yield from reader.take_mark("]")):
        reader.hold()  # no calls
    return reader.held()


class _Call:
    """A call while its object is read. Nothing is emitted before its name is known."""

    def __init__(self, reader: AnswerReader, tools: Tools, is_known: bool, key: str) -> None:
        self.reader, self.tools, self.is_known, self.key = reader, tools, is_known, key
        self.has_begun = self.is_whole = False
        self.arguments: str | None = None  # arguments that precede the name
        self.more: dict[str, str] = {}  # values beside the name: the arguments if there are no others
        self.name = ""

    def begin(self, name: object) -> None:
        if self.has_begun:
            return
        name = offered(name, self.tools) if isinstance(name, str) else ""
        if not name or (self.is_known and name not in self.tools):
            raise NotJson
        self.has_begun, self.reader.room, self.name = True, NO_LIMIT, name
        self.reader.held()
        self.reader.begin_call(name)
        if self.arguments is not None:
            self.reader.arguments(self.arguments)


def read_call(reader: AnswerReader, tools: Tools, *, is_known: bool, key: str) -> Steps[bool]:
    """Read the next object as a call. Returns False if it is not one, and its text is held.

    Raises NotJson if it is malformed between its name and its arguments, or in these.
    """
    call, reader.room = _Call(reader, tools, is_known, key), HELD_CHARS
    try:
        yield from _object(call, is_inside=False)
    except NotJson:
        if call.has_begun and not call.is_whole:
            raise
    finally:
        reader.room = NO_LIMIT
    return call.has_begun


def _object(call: _Call, *, is_inside: bool) -> Steps[None]:
    """is_inside: this is the object that OpenAI's form has in "function"."""
    reader = call.reader
    yield from _sign(reader, "{")
    while (yield from reader.peek()) != "}":
        key = yield from _string(reader)
        yield from reader.drop_spaces()
        yield from _sign(reader, ":")
        is_object = (yield from reader.peek()) == "{"
        if key == "function" and is_object and not (is_inside or call.has_begun):
            yield from _object(call, is_inside=True)
        elif (key in ARGUMENTS or (key in WRAPPERS and is_object)) and not call.is_whole:
            yield from _arguments(call)
            call.is_whole = True
        elif key in ("name", call.key):
            call.begin((yield from _string(reader)))
        elif key in NAMES and (yield from reader.peek()) == '"' and not call.has_begun:
            name = yield from _string(reader)
            if offered(name, call.tools) in call.tools:
                call.begin(name)
        else:
            value: list[str] = []
            yield from read_value(reader, value.append)
            call.more[key] = "".join(value)
        yield from reader.drop_spaces()
        is_over = bool(reader.ends) and (yield from reader.look(*reader.ends))
        if is_over or (yield from reader.peek()) == "}":
            break
        yield from _sign(reader, ",")
    yield from reader.take_mark("}")
    if call.has_begun and not call.is_whole:
        known = names_of(call.tools.get(call.name, {}))
        pairs = (f"{json.dumps(k)}: {v}" for k, v in call.more.items() if k in known and v)
        reader.arguments(f"{{{', '.join(pairs)}}}")
        call.is_whole = True


def _sign(reader: AnswerReader, sign: str) -> Steps[None]:
    yield from take(reader, sign)
    yield from reader.drop_spaces()


def _string(reader: AnswerReader) -> Steps[str]:
    text: list[str] = []
    yield from read_string(reader, text.append)
    return str(json.loads("".join(text)))


def _arguments(call: _Call) -> Steps[None]:
    """The arguments: an object, null instead of an empty one, or a string that contains the object."""
    reader = call.reader
    if (yield from reader.peek()) == "{" and call.has_begun:
        yield from read_value(reader, reader.arguments)
        return
    taken: list[str] = []
    yield from read_value(reader, taken.append)
    call.arguments = as_object("".join(taken))
    if call.has_begun:
        reader.arguments(call.arguments)
