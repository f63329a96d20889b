"""JSON Schemas as their authors mean them: an object that lists its properties has no others.

The standard allows others, and a model then invents some. llama-server, vLLM and OpenAI's strict schemas close objects, too. An object
stays open if it says so (`additionalProperties` and the like), or if closing it could exclude every text or allow a forbidden one:
beside other schemas for the same object, and under negation. A `oneOf` becomes `anyOf` if no text matches two of its choices. An
unknown `format` has no effect, as in the standard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from pyspec.text.schema_keywords import named_types, plain_schema
from pyspec.text.schema_refs import referred

OPEN = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"})
"""Keywords about properties that are not listed."""
JOINED = frozenset(
    [
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref"),
        *("dependentSchemas", "dependentRequired", "dependencies"),
    ]
)
"""Keywords that apply more than one schema to the same object."""
RESTRICTING = frozenset(
    [
        *("type", "enum", "const", *OPEN, *JOINED),
        *("required", "properties", "minProperties", "maxProperties"),
        *("items", "prefixItems", "contains", "minContains", "maxContains"),
        *("minItems", "maxItems", "uniqueItems", "unevaluatedItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "multipleOf", "exclusiveMinimum", "exclusiveMaximum"),
    ]
)
"""Keywords that restrict a value."""
FORMATS = frozenset(
    [
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri", "unknown"),
    ]
)
"""The formats that llguidance enforces; it refuses others."""
NOT_ALONE = (
    *("not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedProperties", "unevaluatedItems"),
)
TYPES = frozenset({"null", "boolean", "object", "array", "number", "string"})
MOST_CHOICES = 100  # choices of a oneOf to compare with each other
MOST_DEEP = 8  # nested references and choices that a comparison follows


def closed(schema: Any) -> Any:
    """The schema in llguidance's keywords. Objects that list their properties are closed. Raises RequestError for a reference that
    can not be resolved."""
    found = referred(schema, plain_schema)
    # an empty enum matches nothing
    schema = {"enum": []} if found is False and isinstance(schema, Mapping) else found
    walk = _Walk(schema)
    walk.look(schema, True)
    return walk.written(schema)


class _Walk:
    """`_may`: for each schema seen, by id(), whether it is the only schema for its object at every place where it is used."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._may: dict[int, bool] = {}

    def look(self, top: Any, may: bool) -> None:
        todo: list[tuple[Any, bool]] = [(top, may)]
        while todo:
            node, may = todo.pop()
            if not isinstance(node, Mapping):
                continue
            if id(node) in self._may and self._may[id(node)] <= may:
                continue
            self._may[id(node)] = may
            todo += self._below(node, may)

    def _below(self, node: Mapping[str, Any], may: bool) -> list[tuple[Any, bool]]:
        """The subschemas, each with whether it is the only one for its object."""
        own = node.keys() & RESTRICTING
        found: list[tuple[Any, bool]] = []
        if "$ref" in node:
            found.append((self._target(node["$ref"]), may and own == {"$ref"}))
        alone = may and not own & JOINED
        found += [(each, alone) for each in _values(node.get("properties"))]
        for name in ("items", "additionalProperties"):
            found.append((node.get(name), alone))
        for name in ("prefixItems", "items"):
            found += [(each, alone) for each in _list(node.get(name))]
        found += [(each, may and own <= {"anyOf", "type"}) for each in _list(node.get("anyOf"))]
        joined = _list(node.get("allOf"))
        found += [(each, may and own == {"allOf"} and len(joined) == 1) for each in joined]
        choices = _list(node.get("oneOf"))
        alone_in = may and own <= {"oneOf", "type"} and self._are_exclusive(choices, _lists_all)
        found += [(each, alone_in) for each in choices]
        for name in ("patternProperties", "dependentSchemas", "dependencies"):
            found += [(each, False) for each in _values(node.get(name))]
        for name in NOT_ALONE:
            found.append((node.get(name), False))
        return found

    def _target(self, reference: str) -> Any:
        if reference == "#":
            return self._root
        return self._root["$defs"][reference.removeprefix("#/$defs/")]

    def _are_exclusive(self, choices: Any, closes: Callable[[Any], bool]) -> bool:
        """True if no text matches two choices: they differ in types or values or in a required property, or each, when closed, lacks
        a property that the other requires."""
        listed = _list(choices)
        if len(listed) > MOST_CHOICES:
            return False
        forms = [self._forms(each, closes, MOST_DEEP) for each in listed]
        if sum(map(len, forms)) > 2 * MOST_CHOICES:
            return False
        pairs = ((a, b) for one, other in combinations(forms, 2) for a in one for b in other)
        return all(a.excludes(b) for a, b in pairs)

    def _forms(self, node: Any, closes: Callable[[Any], bool], depth: int) -> list[_Form]:
        """Alternative descriptions of the values that a schema allows."""
        if not isinstance(node, Mapping) or depth == 0:
            return [_Form(TYPES)] if node is not False else []
        if "$ref" in node:
            # keywords beside a reference only narrow it
            return self._forms(self._target(node["$ref"]), closes, depth - 1)
        for keyword in ("anyOf", "oneOf", "allOf"):
            choices = _list(node.get(keyword))
            is_choice = choices and (keyword != "allOf" or len(choices) == 1)
            if is_choice and not node.keys() & {"type", "enum", "const"}:
                found: list[_Form] = []
                for each in choices:
                    found += self._forms(each, closes, depth - 1)
                    if len(found) > MOST_CHOICES:
                        return [_Form(TYPES)]
                return found
        named = named_types(node)
        wide = ["number" if t == "integer" else t for t in named or ()]
        types = TYPES if named is None else frozenset(wide)
        listed, needed = node.get("properties"), node.get("required", [])
        if not isinstance(listed, Mapping) or not isinstance(needed, list):
            return [_Form(types, _constants(node))]
        known = {name: _constants(self._followed(each)) for name, each in listed.items()}
        has_no_more = node.get("additionalProperties") is False and "patternProperties" not in node
        return [
            _Form(
                types,
                values=_constants(node),
                listed=frozenset(listed),
                needed=frozenset(map(str, needed)),
                known=known,
                is_closed=closes(node) or has_no_more,
            )
        ]

    def _followed(self, node: Any) -> Any:
        for _ in range(MOST_DEEP):
            if isinstance(node, Mapping) and "$ref" in node:
                node = self._target(node["$ref"])
        return node

    def written(self, node: Any) -> Any:
        """A copy with objects closed where possible."""
        if isinstance(node, list):
            return [self.written(each) for each in node]
        if not isinstance(node, Mapping):
            return node
        copy = {name: self.written(each) for name, each in node.items()}
        if id(node) not in self._may:
            return copy
        if isinstance(form := node.get("format"), str) and form not in FORMATS:
            del copy["format"]
        choices = _list(node.get("oneOf"))
        if choices and "anyOf" not in node and self._are_exclusive(choices, self._closes):
            copy["anyOf"] = copy.pop("oneOf")
        if self._closes(node):
            copy["additionalProperties"] = False
        return copy

    def _closes(self, node: Mapping[str, Any]) -> bool:
        return bool(self._may.get(id(node))) and _lists_all(node)


@dataclass(frozen=True, slots=True)
class _Form:
    """A set of values that a choice of oneOf allows.

    types   "number" includes integers
    values  the texts of all allowed values, if they are listed
    listed, needed, known, is_closed: an object's properties, the required ones, their values, and whether there are no others
    """

    types: frozenset[str]
    values: frozenset[str] | None = None
    listed: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()
    known: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    is_closed: bool = False

    def excludes(self, other: _Form) -> bool:
        common = self.types & other.types
        if not common or _differ(self.values, other.values):
            return True
        if common != {"object"}:
            return False
        shared = self.needed & other.needed
        if any(_differ(self.known.get(name), other.known.get(name)) for name in shared):
            return True
        are_closed = self.is_closed and other.is_closed
        return are_closed and not other.needed <= self.listed and not self.needed <= other.listed


def _differ(a: frozenset[str] | None, b: frozenset[str] | None) -> bool:
    return a is not None and b is not None and not a & b


def _constants(node: Any) -> frozenset[str] | None:
    """The texts of the values that a schema lists; None if it lists none."""
    if not isinstance(node, Mapping):
        return None
    listed = [node["const"]] if "const" in node else node.get("enum")
    return frozenset(map(_text_of, listed)) if isinstance(listed, list) else None


def _text_of(value: Any) -> str:
    """JSON text that is the same for equal values: 1.0 is written as 1."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list | Mapping):
        # any two lists count as equal, and any two objects
        return "list" if isinstance(value, list) else "object"
    return json.dumps(value)


def _lists_all(node: Mapping[str, Any]) -> bool:
    """True if the listed properties alone can satisfy a schema."""
    listed = node.get("properties")
    needed = node.get("required", [])
    least = node.get("minProperties", 0)
    if not isinstance(listed, Mapping) or node.keys() & (OPEN | JOINED):
        return False
    if not isinstance(needed, list) or not set(map(str, needed)) <= listed.keys():
        return False
    return least in range(len(listed) + 1)


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else []


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
