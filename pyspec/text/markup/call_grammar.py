"""Grammars of calls, in llguidance's lark: a dialect's text between its marks, and values held to their schemas.

Each dialect defines its calls from the mark that begins the first one. From that come two grammars: of answers that must be calls,
and of answers with free text up to that mark. Nothing may follow the calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pyspec.text.schema_refs import MOST_HOPS, followed, referred
from pyspec.text.schemas import JSON_OPTIONS, closed

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallRules:
    """`trigger`: the text that begins the first call; `rest`: lark for the text behind it, up to the end of the last call."""

    trigger: str
    rest: str


_PIECES = re.compile(r'\[suffix="(?:[^"\\]|\\.)*"\]|/(?:[^/\\]|\\.)*/|"(?:[^"\\]|\\.)*"')
"""Parts of a rule: suffixes and regular expressions, which stay unchanged, and literals."""


class Lark:
    """A grammar under construction.

    control  the ids of marks that are control tokens: the token may replace its mark
    """

    def __init__(self, control: Mapping[str, int] | None = None) -> None:
        self._control = dict(control or {})
        self._rules: list[str] = ["SPACE: /[ \\t\\r\\n]{1,4}/"]
        self._n = 0

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule with this body. Returns its name."""
        self._n += 1
        self._rules.append(f"r{self._n}{attributes}: {body}")
        return f"r{self._n}"

    def recursive(self, body: Callable[[str], str]) -> str:
        """Add a rule whose body may name it: `body` gets its name. Returns the name."""
        self._n += 1
        name = f"r{self._n}"
        self._rules.append(f"{name}: {body(name)}")
        return name

    def json(self, schema: Schema) -> str:
        """A JSON value."""
        own = {"type": "object"} if not schema else dict(closed(schema))
        return self.rule("%json " + json.dumps(own | {"x-guidance": JSON_OPTIONS}))

    def text_before(self, end: str) -> str:
        """Any text that ends with `end`."""
        return self.rule("/(?s:.*)/", f"[suffix={literal(end)}]")

    def calls(self, rules: CallRules, thought: tuple[str, str] | None = None, lead: str = "") -> str:
        """An answer of calls only, with optional reasoning between the marks of `thought` before them.

        lead  lark of what may stand there instead, in which TEXT is free
        """
        if lead:
            self._text_without(rules.trigger)
            return self._all(concat(lead, literal(rules.trigger), rules.rest))
        begin = ""
        if thought and self.is_control(thought[1]):
            self._text_without(rules.trigger)
            begin = f"({literal(thought[0])} TEXT? {literal(thought[1])} SPACE?)?"
        elif thought:
            begin = f"({literal(thought[0])} {self.text_before(thought[1])} SPACE?)?"
        return self._all(concat(begin, literal(rules.trigger), rules.rest))

    def value(self, schema: Schema) -> str:
        """An answer that is a JSON value."""
        return self._all(self.json(schema))

    def text_or_calls(self, rules: CallRules, frames: Collection[int] = ()) -> str:
        """An answer of free text, with optional calls at its end. frames: control tokens that may stand in the text."""
        self._text_without(rules.trigger)
        free = self.text_before(rules.trigger)
        framed = f"(TEXT? {either([_token(each) for each in frames])})*" if frames else ""
        choices = [concat(framed, "TEXT?" if framed else "TEXT"), concat(framed, free, rules.rest)]
        if rules.trigger in self._control:
            choices.append(concat(framed, "TEXT?", _token(self._control[rules.trigger]), rules.rest))
        return self._all(" | ".join(choices))

    def _text_without(self, mark: str) -> None:
        """Add the terminal TEXT: any text without this mark."""
        self._rules.append(f"TEXT: /(?s:.*)/ & ~/(?s:.*){re_escape(mark)}(?s:.*)/")

    def is_control(self, mark: str) -> bool:
        return mark in self._control

    def whole(self, start: str, **terminals: str) -> str:
        """An answer of this form, with these terminals."""
        self._rules += [f"{name}: {body}" for name, body in terminals.items()]
        return self._all(start)

    def _all(self, start: str) -> str:
        whole = [f"start: {start}", *self._rules]
        return "\n".join(map(self._with_tokens, whole) if self._control else whole)

    def _with_tokens(self, rule: str) -> str:
        """A rule in which control tokens may replace their marks. JSON and terminals stay unchanged."""
        longest_first = sorted(self._control, key=len, reverse=True)
        marks = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

        def spelled(found: re.Match[str]) -> str:
            if not found.group().startswith('"'):
                return found.group()
            text = json.loads(found.group())
            if not marks.search(text):
                return found.group()
            parts = (part for part in marks.split(text) if part)
            return f"({concat(*map(self._mark_or_token, parts))})"

        return _PIECES.sub(spelled, rule) if rule[:1].islower() and "%json" not in rule else rule

    def _mark_or_token(self, text: str) -> str:
        if text not in self._control:
            return literal(text)
        return f"({_token(self._control[text])} | {literal(text)})"


def _token(token: int) -> str:
    return f"<[{token}]>"


def literal(text: str) -> str:
    """A literal in lark."""
    return json.dumps(text, ensure_ascii=False)


def re_escape(text: str) -> str:
    """A text inside a regular expression of lark."""
    return "".join("\\" + c if c in r"\/.^$*+?()[]{}|-" else c for c in text)


def either(options: list[str]) -> str:
    return "(" + " | ".join(options) + ")"


def repeated(call: str, between: str, *, is_single: bool) -> str:
    """One call, or one and more."""
    return call if is_single else f"{call} ({between} {call})*"


def listed(lark: Lark, items: list[tuple[str, bool]], between: str) -> str:
    """Lark for items in their order, each with whether it has to be there, and `between` between those that are."""
    first = rest = ""  # of the items behind the one at hand: where none came before, and where one did
    for body, is_needed in reversed(items):
        item = lark.rule(concat(body, rest))
        first = item if is_needed else f"({item} | {first})" if first else f"{item}?"
        follows = concat(literal(between), item)
        rest = follows if is_needed else f"({follows} | {rest})" if rest else f"({follows})?"
        first, rest = (lark.rule(each) for each in (first, rest))
    return first


def concat(*parts: str) -> str:
    """Parts in order."""
    return " ".join(part for part in parts if part)


def properties_of(schema: Schema) -> list[tuple[str, Schema, bool]]:
    """The arguments that a schema names, each with its schema and whether it is required."""
    schema = referred(schema, names_root=True)
    properties = schema.get("properties")
    required = schema.get("required")
    listed = required if isinstance(required, list) else []
    needed = [name for name in listed if isinstance(name, str)]
    shared = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    if not isinstance(properties, Mapping):
        return []
    return [
        (name, {**shared, **each} if isinstance(each, Mapping) else {}, name in needed)
        for name, each in properties.items()
    ]


def takes_any(schema: Schema) -> bool:
    """True if a schema neither names arguments nor forbids any."""
    return "properties" not in schema and schema.get("additionalProperties") is not False


def words_of(schema: Schema, is_spelled: Callable[[str], bool]) -> list[str] | None:
    """The strings that an argument's schema lists, directly or behind references; None if it lists none.

    is_spelled: true for strings that can be written bare.
    """
    node: Any = schema
    for _ in range(MOST_HOPS):
        node = followed(node, schema)
        if isinstance(node, Mapping) and not node.keys() & {"const", "enum"}:
            only = next((node[word] for word in ("allOf", "anyOf", "oneOf") if word in node), None)
            if not isinstance(only, list) or len(only) != 1:
                return None
            node = only[0]
        else:
            break
    if not isinstance(node, Mapping):
        return None
    listed = [node["const"]] if "const" in node else node.get("enum")
    if isinstance(listed, list) and listed and all(isinstance(word, str) for word in listed):
        return [word for word in listed if is_spelled(word)] or None
    return None
