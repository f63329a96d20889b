"""Arguments whose values arrive as plain text, written as JSON of the types in their schema."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from pyspec.ranges import no_number
from pyspec.text.markup.json_text import as_json
from pyspec.text.markup.reader import HELD_CHARS, AnswerReader, Emit
from pyspec.text.schema_refs import MOST_HOPS, REFERENCES, followed

Schema = Mapping[str, Any]

_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}
WRAPPERS = frozenset({"arguments", "parameters", "input", "args", "params", "kwargs"})
_PYTHON = frozenset({"True", "False", "None"})
ALL = frozenset({"string", "boolean", "integer", "number", "array", "object", "null"})


class ArgumentWriter:
    """Writes the arguments of one call as an object, one name and value at a time."""

    def __init__(self, reader: AnswerReader, schema: Schema) -> None:
        self._reader, self._schema, self._n = reader, schema, 0
        self._written: set[str] = set()
        reader.arguments("{")

    @property
    def names(self) -> Collection[str]:
        """The arguments that the schema names."""
        return names_of(self._schema)

    @property
    def expected(self) -> Collection[str] | None:
        """The named arguments that are not written yet; None if the schema names none."""
        return [name for name in self.names if name not in self._written] if self.names else None

    def value(self, name: str, *, is_text: bool | None = None) -> ValueWriter | Wrapped:
        """The next argument. is_text: True or False if the markup marks it as a string or not, where the schema allows both; None: the schema decides.

        All arguments in one that the tool does not have are read as themselves.
        """
        if name in WRAPPERS and self.names and name not in self.names and not self._n:
            return Wrapped(self, name, is_text)
        return self.writer(name, is_text)

    def writer(self, name: str, is_text: bool | None) -> ValueWriter:
        """Of the value of an argument with this name."""
        self.name(name)
        kinds = types_of(self._schema, name)
        if is_text and "string" in kinds:
            kinds = frozenset({"string"})
        return ValueWriter(self._reader.arguments, kinds, is_quoted=is_text is False)

    def members(self, values: Mapping[str, Any]) -> None:
        """Several arguments with their values."""
        for name, value in values.items():
            self.name(name)
            self._reader.arguments(json.dumps(value, ensure_ascii=False))

    def name(self, name: str) -> None:
        """The name of the next argument, whose value is JSON that the caller writes."""
        comma = ", " if self._n else ""
        self._reader.arguments(f"{comma}{json.dumps(name, ensure_ascii=False)}: ")
        self._n += 1
        self._written.add(name)

    def end(self) -> None:
        self._reader.arguments("}")


def names_of(schema: Schema) -> Collection[str]:
    """The arguments that a schema names."""
    properties = schema.get("properties")
    return properties.keys() if isinstance(properties, Mapping) else ()


class ValueWriter:
    """One value. Strings are written as they arrive, others when complete. is_quoted: the text is JSON, with quotes around strings."""

    def __init__(self, emit: Emit, kinds: frozenset[str], *, is_quoted: bool = False) -> None:
        self._emit, self._kinds, self._is_quoted = emit, kinds, is_quoted
        self._held: list[str] = []
        self._n_held = 0
        self._is_string = kinds == {"string"} and not is_quoted
        if self._is_string:
            emit('"')

    def __call__(self, text: str) -> None:
        if not self._is_string:
            room = HELD_CHARS - self._n_held
            self._held.append(text[:room])
            self._n_held += len(text[:room])
            if len(text) <= room:
                return
            # too long for another type
            self._is_string, text = True, "".join(self._held) + text[room:]
            self._held.clear()
            self._emit('"')
        if text:
            self._emit(json.dumps(text, ensure_ascii=False)[1:-1])

    def end(self) -> None:
        text = "".join(self._held)
        if self._is_quoted and text.strip()[:1] == '"' and _is_json(text):
            self._emit(text.strip())
        else:
            self._emit('"' if self._is_string else typed(text, self._kinds))


class Wrapped:
    """One value that may be an object with all of a call's arguments."""

    def __init__(self, arguments: ArgumentWriter, name: str, is_text: bool | None) -> None:
        self._arguments, self._name, self._is_text = arguments, name, is_text
        self._held: list[str] = []

    def __call__(self, text: str) -> None:
        self._held.append(text)

    def end(self) -> None:
        text = "".join(self._held)
        with suppress(ValueError, RecursionError):
            values = json.loads(as_json(text) or text, parse_constant=no_number)
            if isinstance(values, dict) and values.keys() <= set(self._arguments.names):
                self._arguments.members(values)
                return
        writer = self._arguments.writer(self._name, self._is_text)
        writer(text)
        writer.end()


def typed(text: str, kinds: frozenset[str]) -> str:
    """The text as JSON of one of these types; as a string if no type fits, or if only string does."""
    bare = text.strip()
    written = _as_json(bare, may_be_text="string" in kinds)
    try:
        value = json.loads(written, parse_constant=no_number)
        json.dumps(value).encode()
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = "null" if value is None else _KINDS[type(value)]
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    if isinstance(value, float) and "integer" in kinds and value.is_integer():
        return str(int(value))
    # strings are written bare, so their quotes are part of the text
    if kind == "string" or not fits:
        return json.dumps(text, ensure_ascii=False)
    return written


def _as_json(bare: str, *, may_be_text: bool) -> str:
    """Python's syntax as JSON: lists, objects and words spelled as in Python. Other words only if the text can not be a string."""
    is_python = bare in _PYTHON or bare[:1] in ("{", "[", "(") or not may_be_text
    return (as_json(bare) if is_python and not _is_json(bare) else None) or bare


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def types_of(schema: Schema, name: str) -> frozenset[str]:
    """The types that argument `name` may have; all types if the schema names none."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return _types(properties[name], schema, MOST_HOPS)
    more = schema.get("additionalProperties")
    return _types(more, schema, MOST_HOPS) if isinstance(more, Mapping) else ALL


def _types(schema: Any, root: Schema, hops: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or hops == 0:
        return ALL
    if schema.get("nullable") is True:  # OpenAPI's way to allow null
        return _types({k: v for k, v in schema.items() if k != "nullable"}, root, hops) | {"null"}
    if schema.keys() & REFERENCES:
        return _types(followed(schema, root), root, hops - 1)
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset({kinds}) & ALL or ALL
    if isinstance(kinds, list):
        return frozenset(kind for kind in kinds if isinstance(kind, str)) & ALL or ALL
    if "const" in schema:
        return frozenset({_kind(schema["const"])})
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return frozenset(map(_kind, schema["enum"]))
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list) and schema[keyword]:
            return frozenset().union(*_types_of_all(schema[keyword], root, hops))
    if isinstance(schema.get("allOf"), list):
        return ALL.intersection(*_types_of_all(schema["allOf"], root, hops)) or ALL
    return ALL


def _types_of_all(schemas: list[Any], root: Schema, hops: int) -> list[frozenset[str]]:
    return [_types(each, root, hops - 1) for each in schemas[:64]]


def _kind(value: object) -> str:
    return "null" if value is None else _KINDS.get(type(value), "object")
