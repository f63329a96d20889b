"""JSON Schemas as their authors mean them: an object that lists its properties has those and no others.

The standard says it may have more, and a model that is held to no more than the standard invents some. llama-server, vLLM and OpenAI's
strict schemas do as here. An object stays open where it says so (`additionalProperties` and the like), and where closing it could leave no text, or let
through what the schema forbids: what else it is combined with, and what is asked to fail. Of `oneOf` that becomes `anyOf` where no text of one
fits another. A `format` that is not known says nothing, as in the standard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

NOTES = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "$id",
        "$defs",
        "definitions",
    ]
)
OPEN = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"})
"""Words on properties beyond those that are listed."""
JOINED = frozenset(
    [
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "dependentSchemas",
        "dependentRequired",
        "dependencies",
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
    ]
)
"""Words that lay more than one schema on the same object."""
FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
"""Those that llguidance holds texts to; it refuses others."""
MOST_NODES = 100_000
MOST_CHOICES = 100  # of a oneOf that are compared with each other


def closed(schema: Any) -> Any:
    """The schema with objects closed that list their properties. What can not be followed is left as it is."""
    walk = _Walk(schema)
    try:
        walk.look(schema, True)
        return walk.written(schema)
    except _Unclear:
        return schema


class _Unclear(Exception):
    """References that lead somewhere else than to a place of this schema, or too many of them."""


class _Walk:
    """`_may` has, of every schema that was met, whether it stands alone for its object wherever it is met."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._may: dict[int, bool] = {}
        self._n_look = 0

    def look(self, top: Any, may: bool) -> None:
        todo: list[tuple[Any, bool]] = [(top, may)]
        while todo:
            node, may = todo.pop()
            if not isinstance(node, Mapping) or (id(node) in self._may and self._may[id(node)] <= may):
                continue
            self._n_look += 1
            if self._n_look > MOST_NODES or (node is not self._root and "$id" in node):
                raise _Unclear
            self._may[id(node)] = may
            todo += self._below(node, may)

    def _below(self, node: Mapping[str, Any], may: bool) -> list[tuple[Any, bool]]:
        """Schemas of a schema, each with whether it stands alone."""
        own = node.keys() - NOTES
        found: list[tuple[Any, bool]] = []
        if "$ref" in node:
            found.append((self._target(node["$ref"]), may and own == {"$ref"}))
        if own & {"$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef"}:
            raise _Unclear
        alone = may and not own & JOINED
        found += [(each, alone) for each in _values(node.get("properties"))]
        for name in ("items", "additionalProperties"):
            found.append((node.get(name), alone))
        for name in ("prefixItems", "items"):
            found += [(each, alone) for each in _list(node.get(name))]
        found += [(each, may and own <= {"anyOf", "type"}) for each in _list(node.get("anyOf"))]
        joined = _list(node.get("allOf"))
        found += [(each, may and own == {"allOf"} and len(joined) == 1) for each in joined]
        alone_in = (
            may and own <= {"oneOf", "type", "discriminator"} and self._are_exclusive(node.get("oneOf"), lambda _: True)
        )
        found += [(each, alone_in) for each in _list(node.get("oneOf"))]
        for name in ("patternProperties", "dependentSchemas", "dependencies"):
            found += [(each, False) for each in _values(node.get(name))]
        for name in (
            "not",
            "if",
            "then",
            "else",
            "contains",
            "propertyNames",
            "unevaluatedProperties",
            "unevaluatedItems",
        ):
            found.append((node.get(name), False))
        return found

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")) or "%" in reference:
            raise _Unclear
        at = self._root
        for step in reference.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(at, Mapping) and key in at:
                at = at[key]
            elif isinstance(at, list) and key.isdigit() and int(key) < len(at):
                at = at[int(key)]
            else:
                raise _Unclear
        return at

    def _are_exclusive(self, choices: Any, closes: Callable[[Any], bool]) -> bool:
        """Whether no text of one fits another: a property they all need tells them apart, or closed they lack what others need."""
        forms = [self._form(each, closes) for each in _list(choices)[: MOST_CHOICES + 1]]
        if len(forms) > MOST_CHOICES:
            return False
        return all(a is not None and b is not None and a.excludes(b) for a, b in combinations(forms, 2))

    def _form(self, node: Any, closes: Callable[[Any], bool]) -> _Form | None:
        for _ in range(8):  # a reference may lead to another
            if isinstance(node, Mapping) and node.keys() - NOTES == {"$ref"}:
                node = self._target(node["$ref"])
        if not isinstance(node, Mapping) or node.get("type") != "object" or not _lists_all(node):
            return None
        listed = node["properties"]
        return _Form(
            set(listed),
            set(node.get("required", [])),
            {n: _constants(each) for n, each in listed.items()},
            closes(node),
        )

    def written(self, node: Any) -> Any:
        """A copy, in which what may be closed is."""
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
        if "anyOf" not in node and any(self._may.get(id(each)) for each in choices):
            if not self._are_exclusive(choices, lambda each: bool(self._may.get(id(each)))):
                raise _Unclear
            copy["anyOf"] = copy.pop("oneOf")
        if self._may.get(id(node)) and _lists_all(node):
            copy["additionalProperties"] = False
        return copy


@dataclass(frozen=True, slots=True)
class _Form:
    """An object of a oneOf: its properties, those it needs, and the texts that they may be if those are listed."""

    listed: set[str]
    needed: set[str]
    values: dict[str, set[str] | None]
    is_closed: bool

    def excludes(self, other: _Form) -> bool:
        for name in self.needed & other.needed:
            mine, others = self.values.get(name), other.values.get(name)
            if mine is not None and others is not None and not mine & others:
                return True
        return (
            self.is_closed and other.is_closed and bool(other.needed - self.listed) and bool(self.needed - other.listed)
        )


def _constants(node: Any) -> set[str] | None:
    """The texts that a schema allows by name; None if it is not that simple."""
    if not isinstance(node, Mapping):
        return None
    listed = [node["const"]] if "const" in node else node.get("enum")
    return set(listed) if isinstance(listed, list) and all(isinstance(each, str) for each in listed) else None


def _lists_all(node: Mapping[str, Any]) -> bool:
    """Whether a schema can be kept with the properties that it lists."""
    listed, needed, least = node.get("properties"), node.get("required", []), node.get("minProperties", 0)
    if not isinstance(listed, Mapping) or node.keys() & (OPEN | JOINED):
        return False
    return isinstance(needed, list) and set(map(str, needed)) <= listed.keys() and least in range(len(listed) + 1)


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else []


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
