"""Gemma 4: calls as call:NAME{key:value,..} between control marks, several in a row.

Strings stand between marks of their own, without escapes. Numbers, true, false and null are bare; lists and objects nest, and keys are
bare, too, or in the marks of strings. Models write the keys of an object in the order of their letters, as the template does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pyspec.text.markup.ahead import AHEAD, GAP, NAME, OVER, WORD, Lookahead, Names, Step
from pyspec.text.markup.call_grammar import (
    CallRules,
    Lark,
    Schema,
    concat,
    either,
    listed,
    literal,
    properties_of,
    repeated,
    takes_any,
    words_of,
)
from pyspec.text.markup.json_text import DEPTH, NotJson, as_json, read_escape, read_string
from pyspec.text.markup.reader import AnswerReader, Emit, Steps, Tools, Trimmed, offered
from pyspec.text.markup.typed import ALL, ArgumentWriter, types_of
from pyspec.text.schema_refs import followed

OPEN, CLOSE, CALL = "<|tool_call>", "<tool_call|>", "call:"
QUOTE = '<|"|>'
CHANNEL, END_CHANNEL, THOUGHT = "<|channel>", "<channel|>", "thought"
NAME_CHARS, WORD_CHARS = 256, 512
NESTED = 6  # levels of a schema that a grammar follows; deeper values may be any
ANY_KEY = r"/[^\s<>{}\[\]:,\"']{1,64}/"
SCALARS = ("number", "boolean", "null")

_CALLS: Step = (CALL, ":", "call", "")
_CLOSING = {"{": "}", "(": ")", "[": "]"}
_WORD = re.compile(r"[^,\[\]{}<\n]+")
_WORD_IN_ROUND = re.compile(r"[^,\[\]{}()<\n]+")


class _Ended(NotJson):
    """The call's end mark stands where a key should."""


@dataclass(frozen=True, slots=True)
class KeyedCalls:
    """The marks of a dialect with such calls. Models write another text than `call:`, other brackets, and a namespace, too."""

    open: Step = (OPEN,)
    close: Step = (CLOSE,)
    starts: Step = (CHANNEL,)

    @property
    def ends(self) -> Step:
        return self.close

    def call(
        self, reader: AnswerReader, tools: Tools, *, opened: str, is_open: bool
    ) -> Steps[str | None]:
        if (yield from reader.take_mark(CHANNEL)):
            yield from reader.take_mark(THOUGHT)
            yield from reader.until((END_CHANNEL,), Trimmed(reader.reasoning))
            return ""
        if not is_open or not (name := (yield from self._name(reader, tools))):
            return None
        reader.begin_call(name)
        try:
            yield from _arguments(reader, ArgumentWriter(reader, tools.get(name, {})))
        except _Ended:
            return ""
        except NotJson:  # pass on the model's text, up to the end mark
            yield from reader.find(reader.ends, reader.arguments)
        return ""

    def _name(self, reader: AnswerReader, tools: Tools) -> Steps[str]:
        """Take a call's text up to its bracket. Returns its name; "", with nothing taken, if it has none."""
        brackets: Lookahead = (GAP, AHEAD, ("{", "("))
        exact: Lookahead = ((CALL,), Names(tools), AHEAD, ("{",))
        if found := (yield from reader.take(exact, (_CALLS, GAP, Names(tools), *brackets))):
            return found.name
        if found := (yield from reader.sees((_CALLS, GAP, NAME, *brackets))):
            name = offered(found.name, tools)
            if name not in tools and not (yield from reader.sees(((CALL,), NAME, AHEAD, ("{",)))):
                return ""
            yield from reader.take((_CALLS, GAP, NAME, *brackets))
            return name
        return ""

    def heads(self, tools: Tools) -> tuple[Lookahead, ...]:
        return ((self.open, GAP, _CALLS, GAP, Names(tools), GAP, ("{", "(")),)

    def rules(self, lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
        values = _Values(lark)
        options = [
            concat(literal(f"{CALL}{name}{{"), values.members(schema, NESTED), literal(f"}}{CLOSE}"))
            for name, schema in tools.items()
        ]
        call = lark.rule(either(options))
        return CallRules(OPEN, repeated(call, literal(OPEN), is_single=is_single))


def _arguments(reader: AnswerReader, arguments: ArgumentWriter) -> Steps[None]:
    """Read key:value, or key=value, between the brackets of a call."""
    known: Lookahead = (Names(arguments.names), (":", "="))
    end = _CLOSING[(yield from reader.take_mark(*_CLOSING))]
    while True:
        if not (yield from reader.sees(known)):  # names may begin with a space
            yield from reader.drop_spaces()
            if (yield from _is_end(reader, end)):
                break
        arguments.name((yield from _key(reader, arguments.names)))
        yield from _value(reader, reader.arguments, DEPTH, end)
        yield from reader.drop_spaces()
        if not (yield from reader.take_mark(",")) and (yield from reader.peek()) not in (end, "", "<"):
            raise NotJson
    arguments.end()


def _is_end(reader: AnswerReader, end: str) -> Steps[bool]:
    """Take the bracket that closes. True, too, if the call ends without it."""
    if (yield from reader.take_mark(end)):
        return True
    return (yield from reader.look(*reader.ends)) is not None


def _key(reader: AnswerReader, known: Collection[str] = ()) -> Steps[str]:
    """Read a key, bare or in marks, with the colon behind it."""
    is_known = bool(known) and (yield from reader.sees((Names(known), (":", "="))))
    if not is_known and (quote := (yield from reader.take_mark(QUOTE, '"', "'"))):
        name, found = yield from reader.take_until(quote, most=NAME_CHARS)
        yield from reader.drop_spaces()
        if not found or not (yield from reader.take_mark(":", "=")):
            raise NotJson
        return name
    name, found = yield from reader.take_name(known, ":", "=", CLOSE, most=NAME_CHARS)
    if found not in (":", "="):
        reader.arguments(name)
        raise _Ended if found else NotJson
    return name if name in known else name.strip()


def _value(reader: AnswerReader, emit: Emit, depth: int, end: str) -> Steps[None]:
    """Read one value, and pass it on as JSON. NotJson: it is cut off or malformed. end: the bracket that closes what it is in."""
    yield from reader.drop_spaces()
    if (yield from reader.take_mark(QUOTE)):
        ends = () if reader.is_constrained else tuple(f"{each}{CLOSE}" for each in _CLOSING.values())
        emit('"')
        if not (yield from reader.find((QUOTE, *ends), lambda text: emit(_escaped(text)))):
            raise NotJson
        yield from reader.take_mark(QUOTE)
        emit('"')
        return
    char = yield from reader.peek()
    if char in ("{", "["):
        if not depth:
            raise NotJson
        reader.skip(1)
        emit(char)
        yield from _items(reader, emit, depth - 1, _CLOSING[char])
    elif char == '"':
        yield from read_string(reader, emit)
    elif char == "'":
        reader.skip(1)
        yield from _quoted(reader, emit, end)
    else:
        word, pattern = "", _WORD if end != ")" else _WORD_IN_ROUND
        while more := (yield from reader.take_while(pattern, WORD_CHARS - len(word))):
            word += more
        if not word or not (yield from reader.peek()):
            emit(word)
            raise NotJson
        emit(as_json(word) or json.dumps(word.strip(), ensure_ascii=False))


def _quoted(reader: AnswerReader, emit: Emit, end: str) -> Steps[None]:
    """Read a text in single quotes, which may contain such: it ends where another value or the end of all follows."""
    quotes: Step = (QUOTE, '"', "'", "")
    another: Lookahead = (
        (GAP, (",",)) if end == "]" else (GAP, (",",), GAP, quotes, WORD, quotes, GAP, (":", "="))
    )
    emit('"')
    while sign := (yield from reader.until(("\\", "'"), lambda text: emit(_escaped(text)))):
        if sign == "\\":
            yield from read_escape(reader, emit)
        elif (yield from reader.sees((GAP, (end, CLOSE)), another, (GAP, OVER))):
            emit('"')
            return
        else:
            emit(sign)
    raise NotJson


def _items(reader: AnswerReader, emit: Emit, depth: int, end: str) -> Steps[None]:
    """Read the values of a list, or the keys and values of an object, up to its end."""
    comma = ""
    while True:
        yield from reader.drop_spaces()
        if (yield from _is_end(reader, end)):
            emit(end)
            return
        emit(comma)
        if end == "}":
            name = yield from _key(reader)
            emit(json.dumps(name, ensure_ascii=False) + ": ")
        yield from _value(reader, emit, depth, end)
        yield from reader.drop_spaces()
        if not (yield from reader.take_mark(",")) and (yield from reader.peek()) not in (end, "", "<"):
            raise NotJson
        comma = ", "


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


class _Values:
    """Lark for values of schemas."""

    def __init__(self, lark: Lark) -> None:
        self.lark = lark
        self.text = lark.rule(concat(literal(QUOTE), lark.text_before(QUOTE)))
        self.any = lark.recursive(self._any)

    def _any(self, own: str) -> str:
        key = f"({ANY_KEY} | {self.text})"
        pair = self.lark.rule(concat(key, literal(":"), own))
        return either(
            [
                self.text,
                self.lark.json({"type": list(SCALARS)}),
                self._between("[", f"({own} ({literal(',')} {own})*)?", "]"),
                self._between("{", f"({pair} ({literal(',')} {pair})*)?", "}"),
            ]
        )

    def _between(self, begin: str, body: str, end: str) -> str:
        return concat(literal(begin), body, literal(end))

    def members(self, schema: Schema, depth: int) -> str:
        """Keys and values of an object, without its braces."""
        if takes_any(schema):
            pair = self.lark.rule(concat(f"({ANY_KEY} | {self.text})", literal(":"), self.any))
            return f"({pair} ({literal(',')} {pair})*)?"
        named = sorted(properties_of(schema), key=lambda each: each[0].lower())
        pairs = [
            (concat(literal(f"{name}:"), self.value(own, depth)), is_needed)
            for name, own, is_needed in named
        ]
        return listed(self.lark, pairs, ",")

    def value(self, schema: Schema, depth: int) -> str:
        """A value. Of a schema that is too deep, or has more than types, only the types hold."""
        if depth == 0:
            return self.any
        shared = {"$defs": schema["$defs"]} if "$defs" in schema else {}
        found = followed(schema, schema)
        own: Schema = {**shared, **found} if isinstance(found, Mapping) else {}
        if words := words_of(own, lambda word: QUOTE not in word):
            return either([literal(f"{QUOTE}{word}{QUOTE}") for word in words])
        kinds = types_of({"properties": {"v": own}, **shared}, "v")
        if kinds == ALL:
            return self.any
        options = []
        for kind in sorted(kinds):
            if kind == "string":
                options.append(self.text)
            elif kind == "array":
                options.append(self._list(own, depth))
            elif kind == "object":
                inside = self.members({"type": "object", **own}, depth - 1)
                options.append(self._between("{", inside, "}"))
            else:
                options.append(self.lark.json({**own, "type": kind}))
        return self.lark.rule(either(options))

    def _list(self, own: Schema, depth: int) -> str:
        items = own.get("items")
        shared = {"$defs": own["$defs"]} if "$defs" in own else {}
        each = self.value({**shared, **items}, depth - 1) if isinstance(items, Mapping) else self.any
        return self._between("[", f"({each} ({literal(',')} {each})*)?", "]")
