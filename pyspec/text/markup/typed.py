"""Arguments whose values come as plain text, one by one, written as JSON of the types their schema has."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pyspec.text.markup.reader import HELD_CHARS, AnswerReader

Schema = Mapping[str, Any]
HOPS = 16  # of references

_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}
_PYTHON = {"True": True, "False": False, "None": None}
ALL = frozenset({"string", "boolean", "integer", "number", "array", "object", "null"})


class ArgumentWriter:
    """Writes the object of one call's arguments, a name and its value at a time."""

    def __init__(self, reader: AnswerReader, schema: Schema) -> None:
        self._reader, self._schema, self._n = reader, schema, 0
        reader.arguments("{")

    def value(self, name: str, *, is_text: bool | None = None) -> ValueWriter:
        """The next argument. is_text: whether it is a string, where the markup says so; None: the schema does."""
        self._reader.arguments((", " if self._n else "") + json.dumps(name, ensure_ascii=False) + ": ")
        self._n += 1
        kinds = types_of(self._schema, name)
        if is_text is not None:
            kinds = frozenset({"string"}) if is_text else ALL
        return ValueWriter(self._reader.arguments, kinds)

    def end(self) -> None:
        self._reader.arguments("}")


class ValueWriter:
    """One value: strings are written while they come, all else when it is complete."""

    def __init__(self, give: Callable[[str], None], kinds: frozenset[str]) -> None:
        self._give, self._kinds = give, kinds
        self._held: list[str] = []
        self._n_held = 0
        self._is_string = kinds == {"string"}
        if self._is_string:
            give('"')

    def __call__(self, text: str) -> None:
        if not self._is_string:
            room = HELD_CHARS - self._n_held
            self._held.append(text[:room])
            self._n_held += len(text[:room])
            if len(text) <= room:
                return
            self._is_string, text = True, "".join(self._held) + text[room:]  # too long to be looked at
            self._held.clear()
            self._give('"')
        if text:
            self._give(json.dumps(text, ensure_ascii=False)[1:-1])

    def end(self) -> None:
        self._give('"' if self._is_string else typed("".join(self._held), self._kinds))


def typed(text: str, kinds: frozenset[str]) -> str:
    """The text as JSON of one of these types. A string where it is none, or could be one and nothing else fits."""
    bare = text.strip()
    try:
        value = _PYTHON[bare] if bare in _PYTHON else json.loads(bare, parse_constant=_no_constant)
        json.dumps(value).encode()
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = "null" if value is None else _KINDS[type(value)]
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    if isinstance(value, float) and "integer" in kinds and value.is_integer():
        return str(int(value))
    if kind == "string" or not fits:  # a string comes bare: quotes are its own
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False) if bare in _PYTHON else bare


def types_of(schema: Schema, name: str) -> frozenset[str]:
    """The types that argument `name` may have; all if the schema does not say."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return _types(properties[name], schema, HOPS)
    more = schema.get("additionalProperties")
    return _types(more, schema, HOPS) if isinstance(more, Mapping) else ALL


def _types(schema: Any, root: Schema, hops: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or hops == 0:
        return ALL
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_found(reference, root), root, hops - 1)
    said = schema.get("type")
    if isinstance(said, str):
        return frozenset({said}) & ALL or ALL
    if isinstance(said, list):
        return frozenset(kind for kind in said if isinstance(kind, str)) & ALL or ALL
    if "const" in schema:
        return frozenset({_kind(schema["const"])})
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return frozenset(map(_kind, schema["enum"]))
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list) and schema[word]:
            return frozenset().union(*(_types(each, root, hops - 1) for each in schema[word][:64]))
    if isinstance(schema.get("allOf"), list):
        return ALL.intersection(*(_types(each, root, hops - 1) for each in schema["allOf"][:64])) or ALL
    return ALL


def _found(reference: str, root: Schema) -> Any:
    """What a reference within the schema points to."""
    at: Any = root
    for step in reference.removeprefix("#/").split("/") if reference.startswith("#/") else [None]:
        at = at.get(step) if isinstance(at, Mapping) else None
    return at


def _kind(value: object) -> str:
    return "null" if value is None else _KINDS.get(type(value), "object")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
