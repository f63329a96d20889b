"""Gemma 4: calls as call:NAME{key:value,..} between control marks, several in a row.

Strings stand between marks of their own, without escapes. Numbers, true, false and null are bare; lists and objects nest, and keys are
bare, too, or in the marks of strings. Models write the keys of an object in the order of their letters, as the template does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspec.text.markup.ahead import AHEAD, GAP, NAME, Lookahead, Names, Step
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
from pyspec.text.markup.json_text import NotJson, Style, read_members
from pyspec.text.markup.reader import AnswerReader, Steps, Tools, Trimmed, offered
from pyspec.text.markup.typed import ALL, names_of, types_of
from pyspec.text.schema_refs import followed

OPEN, CLOSE, CALL = "<|tool_call>", "<tool_call|>", "call:"
QUOTE = '<|"|>'
CHANNEL, END_CHANNEL, THOUGHT = "<|channel>", "<channel|>", "thought"
NESTED = 6  # levels of a schema that a grammar follows; deeper values may be any
ANY_KEY = r"/[^\s<>{}\[\]:,\"']{1,64}/"
SCALARS = ("number", "boolean", "null")

_CALLS: Step = (CALL, ":", "call", "")
_QUOTES: Step = ("", '"', "'", "`")


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
        bare: Lookahead = (_CALLS, GAP, Names(tools), GAP, AHEAD, self.close)
        if is_open and (found := (yield from reader.take(bare))):
            reader.begin_call(found.name)
            reader.arguments("{}")
            return ""
        if not is_open or not (name := (yield from self._name(reader, tools))):
            return None
        reader.begin_call(name)
        style = Style(Names(names_of(tools.get(name, {}))), (":", "="), QUOTE)
        try:
            yield from read_members(reader, reader.arguments, style)
        except NotJson:  # pass on the model's text, up to the end mark
            yield from reader.find(reader.ends, reader.arguments)
        return ""

    def _name(self, reader: AnswerReader, tools: Tools) -> Steps[str]:
        """Take a call's text up to its bracket. Returns its name; "", with nothing taken, if it has none."""
        brackets: Lookahead = (GAP, AHEAD, ("{", "("))
        exact: Lookahead = ((CALL,), Names(tools), AHEAD, ("{",))
        if found := (
            yield from reader.take(exact, (_CALLS, GAP, _QUOTES, Names(tools), _QUOTES, *brackets))
        ):
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
