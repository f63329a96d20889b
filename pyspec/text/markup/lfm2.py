"""LFM2: calls in the form of Python, [f(a="x", b=2), g()], between control marks. Some answers have JSON objects there instead.

Arguments have their names before them. Values are Python's or JSON's.
"""

from __future__ import annotations

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
)
from pyspec.text.markup.json_text import NotJson, Style, read_members, read_value
from pyspec.text.markup.objects import object_head
from pyspec.text.markup.reader import AnswerReader, Steps, Tools, offered
from pyspec.text.markup.typed import names_of, types_of

ANY_VALUE = {"type": ["string", "number", "boolean", "array", "object", "null"]}
WORDS = either([literal(word) for word in ("True", "False", "true", "false")])


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """The marks of a dialect with such calls."""

    open: Step = ("<|tool_call_start|>",)
    close: Step = ("<|tool_call_end|>",)
    starts: Step = ()

    @property
    def ends(self) -> Step:
        return self.close

    def call(
        self, reader: AnswerReader, tools: Tools, *, opened: str, is_open: bool
    ) -> Steps[str | None]:
        """Read calls up to the bracket that closes their list."""
        begin: Step = ("[", "")
        n_calls = reader.n_calls
        while is_open:
            names = (Names(tools), NAME)
            found = yield from reader.take(*((begin, GAP, each, AHEAD, ("(",)) for each in names))
            if not found:
                break
            reader.begin_call(name := offered(found.name, tools))
            try:
                keys = Names(names_of(tools.get(name, {})))
                whole: Lookahead = (
                    ("(",),
                    GAP,
                    ("**", ""),
                    AHEAD,
                    ("{",),
                    GAP,
                    ('"', "'"),
                    keys,
                    ('"', "'"),
                    GAP,
                    (":",),
                )
                if not reader.is_constrained and (yield from reader.take(whole)):
                    yield from read_value(reader, reader.arguments)
                    yield from reader.take((GAP, (")",)))
                else:
                    style = Style(keys, ("=",))
                    yield from read_members(reader, reader.arguments, style)
            except NotJson:  # pass on the model's text, up to the end mark
                yield from reader.find(reader.ends, reader.arguments)
                return ""
            begin = (",", ";", "")
            yield from reader.take_spaces()
        if reader.n_calls == n_calls:
            return None
        yield from reader.take_mark("]")
        return ""

    def heads(self, tools: Tools) -> tuple[Lookahead, ...]:
        start: Lookahead = (self.open, GAP, ("[",), GAP)
        return (*start, Names(tools), ("(",)), (*start, *object_head(tools))

    def rules(self, lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
        options = [
            concat(literal(f"{name}("), _named(lark, schema), literal(")"))
            for name, schema in tools.items()
        ]
        calls = repeated(lark.rule(either(options)), literal(", "), is_single=is_single)
        return CallRules(self.open[0], concat(literal("["), calls, literal("]"), literal(self.close[0])))


def _named(lark: Lark, schema: Schema) -> str:
    """Lark for the arguments in the schema's order, with commas between those that are there."""
    if takes_any(schema):
        pair = lark.rule(concat(r"/[^\s=(),]{1,64}/", literal("="), lark.json(ANY_VALUE)))
        return f"({repeated(pair, literal(', '), is_single=False)})?"
    pairs = []
    for name, own, is_needed in properties_of(schema):
        is_word = types_of(schema, name) == {"boolean"} and not own.keys() & {"const", "enum"}
        pairs.append((concat(literal(f"{name}="), WORDS if is_word else lark.json(own)), is_needed))
    return listed(lark, pairs, ", ")
