"""Rewrites the references of a JSON Schema to "#/$defs/NAME".

Anchors, `$id`s and pointers in any spelling are resolved here, so that later steps see only this form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from pyspec.errors import RequestError

Schema = Any
"""A mapping, True or False."""


def words(text: str) -> tuple[str, ...]:
    """The keywords in a text."""
    return tuple(text.split())


ONE = words(
    "additionalItems additionalProperties contains contentSchema else if items not propertyNames then unevaluatedItems "
    "unevaluatedProperties"
)
"""Keywords with a schema as value."""
LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
NAMED = ("dependencies", "dependentSchemas", "patternProperties", "properties")
DEFINED = ("$defs", "definitions")
PLACES = frozenset({"$anchor", "$dynamicAnchor", "$id", "$recursiveAnchor", "id", *DEFINED})
"""Keywords that are dropped, because no reference needs them any more."""
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
MOST_NODES = 100_000
MOST_HOPS = 16
_SAFE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def below(
    node: Mapping[str, Any], keywords: tuple[str, ...] = ONE + LISTS + NAMED + DEFINED
) -> Iterator[Schema]:
    """The direct subschemas of a schema."""
    for keyword in keywords:
        value = node.get(keyword)
        if isinstance(value, list) and keyword in LISTS:
            yield from value
        elif isinstance(value, Mapping) and keyword in NAMED + DEFINED:
            yield from (each for each in value.values() if not isinstance(each, list))
        elif isinstance(value, Mapping | bool) and keyword in ONE:
            yield value


def mapped(node: Mapping[str, Any], change: Callable[[Schema], Schema]) -> dict[str, Any]:
    """A copy of a schema with each direct subschema changed."""
    found = dict(node)
    for keyword in ONE:
        if isinstance(node.get(keyword), Mapping | bool):
            found[keyword] = change(node[keyword])
    for keyword in LISTS:
        if isinstance(node.get(keyword), list):
            found[keyword] = [change(each) for each in node[keyword]]
    for keyword in NAMED:
        if isinstance(node.get(keyword), Mapping):
            below_it = node[keyword].items()
            found[keyword] = {k: v if isinstance(v, list) else change(v) for k, v in below_it}
    return found


def referred(
    root: Schema,
    change: Callable[[dict[str, Any]], Schema] = lambda node: node,
    *,
    names_root: bool = False,
) -> Schema:
    """The schema with all references in one form. A reference to the root is "#", unless `names_root`. `change` changes each schema
    after its subschemas.

    Raises RequestError for a reference that can not be resolved.
    """
    return _References(root, change, names_root).written() if isinstance(root, Mapping) else root


def followed(node: Schema, root: Schema) -> Schema:
    """A schema of `root` with its references resolved; None if one can not be."""
    if not (isinstance(node, Mapping) and isinstance(root, Mapping) and node.keys() & REFERENCES):
        return node
    references = _References(root, lambda node: node, False)
    for _ in range(MOST_HOPS):
        keyword = next(
            (
                word
                for word in REFERENCES
                if isinstance(node, Mapping) and isinstance(node.get(word), str)
            ),
            None,
        )
        if keyword is None:
            return node
        try:
            node = references.target(node, keyword)
        except RequestError:
            return None
    return None


class _References:
    def __init__(
        self, root: Mapping[str, Any], change: Callable[[dict[str, Any]], Schema], names_root: bool
    ) -> None:
        self._root, self._change = root, change
        self._bases: dict[int, str] = {}  # base URI of each schema, by id()
        self._documents: dict[str, Schema] = {"": root}
        self._anchors: dict[tuple[str, str], Schema] = {}
        self._twice: set[tuple[str, str]] = set()
        self._names: dict[int, str] = {} if names_root else {id(root): "#"}
        self._todo: list[tuple[str, Schema]] = []
        self._n_written = 0
        self._look()

    def _look(self) -> None:
        todo: list[tuple[Schema, str]] = [(self._root, "")]
        while todo:
            node, base = todo.pop()
            if not isinstance(node, Mapping) or id(node) in self._bases:
                continue
            for keyword in ("$id", "id"):
                if isinstance(uri := node.get(keyword), str) and not uri.startswith("#"):
                    base = urldefrag(urljoin(base, uri))[0]
                    self._documents.setdefault(base, node)
            self._bases[id(node)] = base
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := node.get(keyword), str):
                    place = base, name
                    if self._anchors.setdefault(place, node) is not node:
                        self._twice.add(place)
            todo += [(each, base) for each in below(node)]

    def written(self) -> Schema:
        found = self._copy(self._root)
        defined = {}
        while self._todo:
            name, node = self._todo.pop()
            defined[name] = self._copy(node)
        return found | {"$defs": defined} if defined and isinstance(found, dict) else found

    def _copy(self, node: Schema) -> Schema:
        self._n_written += 1
        if self._n_written > MOST_NODES:
            most = f"{MOST_NODES} parts, including referenced ones"
            raise RequestError(f"the json_schema has more than {most}")
        if not isinstance(node, Mapping):
            return node
        given, node = node, self._with_names(node)
        found = mapped({k: v for k, v in node.items() if k not in PLACES}, self._copy)
        for keyword in REFERENCES:
            if isinstance(reference := found.pop(keyword, None), str):
                place = self._name(self.target(given, keyword), reference)
                if "$ref" in found:
                    found["allOf"] = [*found.get("allOf", ()), {"$ref": place}]
                else:
                    found["$ref"] = place
        return self._change(found)

    def _with_names(self, node: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace a reference in `propertyNames` by its target, because `propertyNames` becomes other keywords."""
        names = node.get("propertyNames")
        for _ in range(MOST_HOPS):
            if not (isinstance(names, Mapping) and isinstance(names.get("$ref"), str)):
                break
            names = self.target(names, "$ref")
        return node if names is node.get("propertyNames") else {**node, "propertyNames": names}

    def _name(self, target: Schema, reference: str) -> str:
        """The new place of a schema: under its own name, if that is plain and not taken."""
        key = id(target) if isinstance(target, Mapping) else hash(target)
        if key not in self._names:
            own = reference.rpartition("/")[2]
            taken = set(self._names.values())
            if not _SAFE.fullmatch(own) or f"#/$defs/{own}" in taken:
                own = f"d{len(taken)}-"
            self._names[key] = f"#/$defs/{own}"
            self._todo.append((own, target))
        return self._names[key]

    def target(self, node: Mapping[str, Any], keyword: str) -> Schema:
        """Resolve a reference of a schema. Raises RequestError."""
        reference, base = str(node[keyword]), self._bases.get(id(node), "")
        where, fragment = urldefrag(urljoin(base, reference) if base else reference)
        found = self._documents.get(where)
        if keyword == "$recursiveRef" and any(n != self._root for n in self._recursive()):
            found = None
        if found is not None and fragment.startswith("/"):
            found = _at(found, fragment)
        elif found is not None and fragment:
            place = where, unquote(fragment)
            found = None if place in self._twice else self._anchors.get(place)
        if not isinstance(found, Mapping | bool):
            raise RequestError(
                f"the json_schema refers to {reference!r:.120}, which is no part of it that can be followed"
            )
        return found

    def _recursive(self) -> list[Schema]:
        todo, found = [self._root], []
        while todo:
            node = todo.pop()
            if isinstance(node, Mapping):
                found += [node] * bool(node.get("$recursiveAnchor"))
                todo += below(node)
        return found


def _at(node: Any, pointer: str) -> Any:
    """The value at a JSON pointer, percent-encoded or not; None if there is none."""
    for step in pointer.split("/")[1:]:
        keys = [key.replace("~1", "/").replace("~0", "~") for key in (unquote(step), step)]
        if isinstance(node, Mapping):
            node = next((node[key] for key in keys if key in node), None)
        elif isinstance(node, list) and keys[0].isdecimal() and int(keys[0]) < len(node):
            node = node[int(keys[0])]
        else:
            return None
    return node
