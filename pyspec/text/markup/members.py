"""Calls as a name and its arguments in brackets, each behind its own name: Gemma 4 and LFM2.

Gemma writes call:NAME{key:value,..} between control marks, several in a row. Strings stand between marks of their own, without escapes;
numbers, true, false and null are bare; lists and objects nest, and keys are bare, too, or in the marks of strings. Models write the keys
of an object in the order of their letters, as the template does.

LFM2 writes a list in the form of Python, [f(a="x", b=2), g()]. Values are Python's or JSON's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspec.text.markup.ahead import AHEAD, GAP, NAME, Lookahead, Names, Step
from pyspec.text.markup.call_grammar import (
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
from pyspec.text.markup.json_text import NotJson, Style, read_members, read_value
from pyspec.text.markup.objects import object_head
from pyspec.text.markup.prose import Syntax
from pyspec.text.markup.reader import AnswerReader, Steps, Tools, Trimmed, offered
from pyspec.text.markup.typed import ALL, names_of, types_of
from pyspec.text.schema_refs import followed

NESTED = 6  # levels of a schema that a grammar follows; deeper values may be any
SCALARS = ("number", "boolean", "null")
ANY_VALUE = {"type": ["string", "number", "boolean", "array", "object", "null"]}
WORDS = either([literal(word) for word in ("True", "False", "true", "false")])

_QUOTES: Step = ("", '"', "'", "`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Members(Syntax):
    """A dialect with such calls. Models write another text before the name, other brackets, and a namespace, too.

    before    texts before a name; the exact one first, which grammars write
    brackets  around the arguments; the exact pair first
    colons, comma  what stands behind the name of an argument, and between two
    any_key   lark of the name of an argument that no schema names
    quote     a mark around strings, which have no escapes then; "": values are Python's or JSON's
    thought   a channel of reasoning between calls: its marks, and the word that begins it
    """

    before: Step
    brackets: tuple[tuple[str, str], ...]
    colons: Step
    comma: str
    any_key: str
    quote: str = ""
    thought: tuple[str, str, str] | None = None

    def call(
        self, reader: AnswerReader, tools: Tools, *, opened: str, is_open: bool
    ) -> Steps[str | None]:
        if self.thought and (yield from reader.take_mark(self.thought[0])):
            yield from reader.take_mark(self.thought[2])
            yield from reader.until((self.thought[1],), Trimmed(reader.reasoning))
            return ""
        name = yield from self._name(reader, tools) if is_open else self._unmarked(reader, tools)
        if not name:
            return None
        reader.begin_call(name)
        try:
            yield from self._arguments(reader, Names(names_of(tools.get(name, {}))))
        except NotJson:  # pass on the model's text, up to the end mark
            yield from reader.find(reader.ends, reader.arguments)
            return ""
        if self.last:
            yield from reader.take_spaces()
            if not (yield from reader.take_mark("]")) and not is_open:
                yield from self.call(reader, tools, opened=opened, is_open=True)
        return ""

    def _unmarked(self, reader: AnswerReader, tools: Tools) -> Steps[str]:
        """The same where no mark begins the call: it begins a line, and one of the tool's arguments follows, or none."""
        (begin, end), before = self.brackets[0], tuple(set(self.starts) & set(self.before))
        forms: list[Lookahead] = [
            (before, Names([name]), AHEAD, (begin,), GAP, (*(key + self.colons[0] for key in names_of(schema)), end))
            for name, schema in tools.items()
            if before and reader.is_line
        ]  # fmt: skip
        found = yield from reader.take(*forms)
        return found.name if found else ""

    def _name(self, reader: AnswerReader, tools: Tools) -> Steps[str]:
        """Take a call's text up to its bracket. Returns its name; "", with nothing taken, if it has none."""
        begins = tuple(pair[0] for pair in self.brackets)
        behind: Lookahead = (GAP, AHEAD, begins)
        exact: Lookahead = (self.before[:1], Names(tools), AHEAD, begins[:1])
        loose: Lookahead = (self.before, GAP, _QUOTES, Names(tools), _QUOTES, *behind)
        bare: Lookahead = (self.before, GAP, Names(tools), GAP, AHEAD, self.close)
        if found := (yield from reader.take(bare, exact, loose)):
            return found.name
        unknown: Lookahead = (self.before, GAP, NAME, *behind)
        if found := (yield from reader.sees(unknown)):
            name = offered(found.name, tools)
            exact = (*((self.before, GAP) if self.last else (self.before[:1],)), NAME, AHEAD, begins[:1])
            if name not in tools and not (yield from reader.sees(exact)):
                return ""
            yield from reader.take(unknown)
            return name
        return ""

    def _arguments(self, reader: AnswerReader, keys: Names) -> Steps[None]:
        """Read the arguments: their brackets, an object in round ones, or none."""
        if (yield from reader.look(*self.close)):
            reader.arguments("{}")
            return
        key: Lookahead = (GAP, ('"', "'"), keys, ('"', "'"), GAP, (":",))
        whole: Lookahead = (("(",), GAP, ("**", ""), AHEAD, ("{",), *key)
        if not reader.is_constrained and (yield from reader.take(whole)):
            yield from read_value(reader, reader.arguments)
            yield from reader.take((GAP, (")",)))
        else:
            yield from read_members(reader, reader.arguments, Style(keys, self.colons, self.quote))

    def heads(self, tools: Tools) -> tuple[Lookahead, ...]:
        begins = tuple(pair[0] for pair in self.brackets)
        start: Lookahead = (self.open, GAP, self.before, GAP)
        return (*start, Names(tools), GAP, begins), (*start, *object_head(tools))

    def bodies(self, lark: Lark, tools: Tools) -> list[str]:
        values, (begin, end) = _Values(lark, self), self.brackets[0]
        head = self.before[0] if not self.last else ""
        return [
            concat(literal(f"{head}{name}{begin}"), values.members(schema, NESTED), literal(end))
            for name, schema in tools.items()
        ]


class _Values:
    """Lark for values of schemas."""

    def __init__(self, lark: Lark, form: Members) -> None:
        self.lark, self.form, self.key = lark, form, form.any_key
        self.colon, self.comma = literal(form.colons[0]), literal(form.comma)
        self.text = self.any = ""
        if form.quote:
            self.text = lark.rule(concat(literal(form.quote), lark.text_before(form.quote)))
            self.key = f"({form.any_key} | {self.text})"
            self.any = lark.recursive(self._any)

    def _any(self, own: str) -> str:
        pair = self.lark.rule(concat(self.key, self.colon, own))
        scalar = self.lark.json({"type": list(SCALARS)})
        return either([self.text, scalar, self._between("[", own, "]"), self._between("{", pair, "}")])

    def _several(self, each: str) -> str:
        return f"({repeated(each, self.comma, is_single=False)})?"

    def _between(self, begin: str, each: str, end: str) -> str:
        return concat(literal(begin), self._several(each), literal(end))

    def members(self, schema: Schema, depth: int) -> str:
        """Names and values of arguments, or of an object without its braces, in the schema's order if that is kept."""
        if takes_any(schema):
            any_value = self.any or self.lark.json(ANY_VALUE)
            return self._several(self.lark.rule(concat(self.key, self.colon, any_value)))
        named = properties_of(schema)
        if self.form.quote:
            named.sort(key=lambda each: each[0].lower())
        colon = self.form.colons[0]
        pairs = [
            (concat(literal(f"{name}{colon}"), self.value(own, depth)), is_needed)
            for name, own, is_needed in named
        ]
        return listed(self.lark, pairs, self.form.comma)

    def value(self, schema: Schema, depth: int) -> str:
        """A value. Between marks, of a schema that is too deep, or has more than types, only the types hold."""
        shared = {"$defs": schema["$defs"]} if "$defs" in schema else {}
        if not self.form.quote:
            kinds = types_of({"properties": {"v": schema}, **shared}, "v")
            is_word = kinds == {"boolean"} and not schema.keys() & {"const", "enum"}
            return WORDS if is_word else self.lark.json(schema)
        if depth == 0:
            return self.any
        found = followed(schema, schema)
        own: Schema = {**shared, **found} if isinstance(found, Mapping) else {}
        quote = self.form.quote
        if words := words_of(own, lambda word: quote not in word):
            return either([literal(f"{quote}{word}{quote}") for word in words])
        kinds = types_of({"properties": {"v": own}, **shared}, "v")
        if kinds == ALL:
            return self.any
        options = []
        for kind in sorted(kinds):
            if kind == "string":
                options.append(self.text)
            elif kind == "array":
                items = own.get("items")
                each = self.any
                if isinstance(items, Mapping):
                    each = self.value({**shared, **items}, depth - 1)
                options.append(self._between("[", each, "]"))
            elif kind == "object":
                inside = self.members({"type": "object", **own}, depth - 1)
                options.append(concat(literal("{"), inside, literal("}")))
            else:
                options.append(self.lark.json({**own, "type": kind}))
        return self.lark.rule(either(options))


GEMMA4 = Members(
    open=("<|tool_call>",),
    starts=("<|channel>", "call:"),
    close=("<tool_call|>",),
    inner=('<|"|>', "<|channel>", "<channel|>"),
    lead="",
    gap="",
    before=("call:", ":", "call", ""),
    brackets=(("{", "}"), ("(", ")")),
    colons=(":", "="),
    comma=",",
    any_key=r"/[^\s<>{}\[\]:,\"']{1,64}/",
    quote='<|"|>',
    thought=("<|channel>", "<channel|>", "thought"),
)
LFM2 = Members(
    open=("<|tool_call_start|>",),
    close=("<|tool_call_end|>",),
    is_section=True,
    first=literal("["),
    between=literal(", "),
    last=literal("]"),
    lead="",
    gap="",
    before=("[", ",", ";", ""),
    brackets=(("(", ")"),),
    colons=("=",),
    comma=", ",
    any_key=r"/[^\s=(),]{1,64}/",
)
