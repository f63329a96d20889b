"""JSON Schemas as their authors mean them: an object that lists its properties has no others.

The standard allows others, and a model then invents some. llama-server, vLLM and OpenAI's strict schemas close objects, too. An object
stays open if it says so (`additionalProperties` and the like), or if closing it could exclude every text or allow a forbidden one:
beside other schemas for the same object, and under negation. A `oneOf` becomes `anyOf` if no text matches two of its choices. An
unknown `format` has no effect, as in the standard.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from pyspec.text.schema_patterns import plain_patterns
from pyspec.text.schema_refs import referred, words

JSON_OPTIONS: Any = {
    "whitespace_pattern": r"[ ]|\n{1,2}[ \t]{0,20}",
    "lenient": False,
    "coerce_one_of": False,
}
"""llguidance's options of all schemas. White space between two JSON tokens is as llama.cpp allows it, and bounded, so that no run of spaces lasts."""

# -- keywords --------------------------------------------------------------------------------------------------------
# Rewrites keywords of JSON Schemas that llguidance does not know into ones that it knows. Keywords without effect are dropped.
# llguidance refuses the remaining ones by name.

_COUNTED = ("Length", "Items", "Properties", "Contains")
COUNTS = tuple(f"{end}{what}" for what in _COUNTED for end in ("min", "max"))
OF_ARRAYS = words("uniqueItems contains minContains maxContains unevaluatedItems additionalItems")
OF_OBJECTS = words("propertyNames dependentRequired dependentSchemas dependencies unevaluatedProperties")
ANNOTATIONS = frozenset(
    words(
        "title description default example examples deprecated readOnly writeOnly contentEncoding contentMediaType contentSchema "
        "externalDocs xml $comment $schema $vocabulary $id $defs definitions"
    )
)
"""Keywords that do not restrict a value."""
TYPES = frozenset({"array", "boolean", "null", "number", "object", "string"})
_CONDITIONS = ("if", "then", "else", "dependentSchemas", "dependencies")
JOINS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not", *_CONDITIONS})


def plain_schema(node: dict[str, Any]) -> Any:
    """A schema in plainer keywords of draft 2020-12. Its subschemas are plain already."""
    node.pop("$schema", None)  # llguidance would apply another draft's rules
    if _without_not(node) is False:
        return False
    for change in (
        _nullable,
        _counts,
        _old_bounds,
        _of_other_types,
        _conditions,
        _dependencies,
        _arrays,
        _unevaluated,
        _names,
        plain_patterns,
    ):
        node = change(node)
    return node


def _nullable(node: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI's way to allow null beside other values."""
    if node.pop("nullable", None) is not True:
        return node
    if isinstance(node.get("enum"), list) and None not in node["enum"]:
        node["enum"] = [*node["enum"], None]
    if isinstance(types := node.get("type"), str | list):
        own = [types] if isinstance(types, str) else types
        return node | {"type": [*own, *(["null"] if "null" not in own else [])]}
    return {"anyOf": [node, {"type": "null"}]} if node.keys() & JOINS else node


def allows_any(schema: Any) -> bool:
    """True if any value matches a schema."""
    return schema is True or (isinstance(schema, Mapping) and not schema.keys() - ANNOTATIONS)


def named_types(node: Mapping[str, Any]) -> frozenset[str] | None:
    """The types that a schema names; None if it names none."""
    types = node.get("type")
    if isinstance(types, str):
        return frozenset([types])
    if isinstance(types, list):
        return frozenset(each for each in types if isinstance(each, str))
    return None


def _without_not(node: dict[str, Any]) -> bool:
    """Replace `not` by other keywords where possible. False: no value matches the schema."""
    negated = node.get("not", False)
    if allows_any(negated):
        return False
    keywords = set(negated) - ANNOTATIONS if isinstance(negated, Mapping) else set()
    types = named_types(negated) if keywords == {"type"} else None
    is_left = True
    if negated is False:
        node.pop("not", None)
    elif types is not None:
        is_left = _without_types(node, types)
    elif keywords == {"const"} or (keywords == {"enum"} and isinstance(negated["enum"], list)):
        values = [negated["const"]] if "const" in negated else negated["enum"]
        is_left = _without_values(node, values)
    elif keywords == {"pattern"} and named_types(node) == {"string"}:
        _without_pattern(node, negated["pattern"])
    return is_left


def _without_pattern(node: dict[str, Any], pattern: Any) -> None:
    if isinstance(pattern, str):
        is_anchored = pattern.startswith("^")
        _beginning_otherwise(node, pattern[1:] if is_anchored else f"[\\s\\S]*{pattern}")


def _without_types(node: dict[str, Any], out: frozenset[str]) -> bool:
    types = named_types(node) or TYPES
    if "integer" in out - types and "number" in types and "number" not in out:
        return True  # no type covers the numbers that are not integers
    left = types - out - ({"integer"} if "number" in out else set())
    node.pop("not")
    node["type"] = sorted(left)
    return bool(left)


def _without_values(node: dict[str, Any], out: list[Any]) -> bool:
    listed = [node["const"]] if "const" in node else node.get("enum")
    if isinstance(listed, list):
        texts = {json.dumps(each, sort_keys=True) for each in out}
        node.pop("const", None)
        node.pop("not")
        node["enum"] = [each for each in listed if json.dumps(each, sort_keys=True) not in texts]
        return bool(node["enum"])
    if named_types(node) == {"string"}:
        texts = {each for each in out if isinstance(each, str)}
        _beginning_otherwise(node, f"(?:{'|'.join(map(_escaped, sorted(texts)))})$")
    return True


def _beginning_otherwise(node: dict[str, Any], pattern: str) -> None:
    """Replace `not` by a pattern of texts with another beginning. If there is no such pattern, `not` stays and is refused."""
    found = plain_patterns({"pattern": f"^(?!{pattern})"})
    if "allOf" in found:
        node.pop("not")
        node["allOf"] = [*node.get("allOf", ()), *found["allOf"]]


def _counts(node: dict[str, Any]) -> dict[str, Any]:
    """Make whole floats integers: JSON Schema allows 4.0 as a count."""
    for keyword in COUNTS:
        if isinstance(value := node.get(keyword), float) and value.is_integer():
            node[keyword] = int(value)
    return node


def _old_bounds(node: dict[str, Any]) -> dict[str, Any]:
    """Rewrite `exclusiveMinimum: true`, draft 4's modifier of `minimum`."""
    for keyword, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(node.get(keyword), bool) and (node.pop(keyword) and bound in node):
            node[keyword] = node.pop(bound)
    return node


def _of_other_types(node: dict[str, Any]) -> dict[str, Any]:
    """Drop keywords of arrays and objects from schemas of other types."""
    types = named_types(node)
    for kind, keywords in (("array", OF_ARRAYS), ("object", OF_OBJECTS)):
        if types is not None and kind not in types:
            node = {keyword: value for keyword, value in node.items() if keyword not in keywords}
    return node


def _conditions(node: dict[str, Any]) -> dict[str, Any]:
    if "if" not in node:
        node.pop("then", None)
        node.pop("else", None)
        return node
    branches = {
        keyword: node[keyword]
        for keyword in ("then", "else")
        if keyword in node and not allows_any(node[keyword])
    }
    condition = node["if"]
    if not branches or condition is False or allows_any(condition):
        for keyword in ("if", "then", "else"):
            node.pop(keyword, None)
        kept = branches.get("else" if condition is False else "then")
        if kept is not None:
            node["allOf"] = [*node.get("allOf", ()), kept]
    return node


def _dependencies(node: dict[str, Any]) -> dict[str, Any]:
    """Make dependencies of a required property required."""
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        if not isinstance(dependencies := node.get(keyword), Mapping):
            continue
        needed = node.get("required", [])
        left = {}
        for name, each in dependencies.items():
            if isinstance(each, list) and name in needed:
                needed = [*needed, *(other for other in each if other not in needed)]
                node["required"] = needed
            elif isinstance(each, Mapping) and name in needed:
                node["allOf"] = [*node.get("allOf", ()), each]
            elif each != [] and not allows_any(each):
                left[name] = each
        node[keyword] = left
        if not left:
            node.pop(keyword)
    return node


def _arrays(node: dict[str, Any]) -> dict[str, Any]:
    if isinstance(node.get("items"), list):  # until draft 2019-09
        rest = node.pop("additionalItems", None)
        node["prefixItems"] = node.pop("items")
        if rest is not None:
            node["items"] = rest
    node.pop("additionalItems", None)
    most = node.get("maxItems")
    if not node.get("uniqueItems") or (isinstance(most, int) and most <= 1):
        node.pop("uniqueItems", None)
    if "contains" not in node or (node.get("minContains") == 0 and "maxContains" not in node):
        for keyword in ("contains", "minContains", "maxContains"):
            node.pop(keyword, None)
    elif allows_any(node["contains"]) and "maxContains" not in node:
        least = max(node.pop("minContains", 1), node.get("minItems", 0))
        node["minItems"] = least
        node.pop("contains")
    return node


def _unevaluated(node: dict[str, Any]) -> dict[str, Any]:
    """Replace `unevaluated...` by the list's keyword, if no other keyword evaluates the same value."""
    for keyword, same, evaluates in (
        ("unevaluatedProperties", "additionalProperties", JOINS),
        ("unevaluatedItems", "items", JOINS | {"contains"}),
    ):
        if keyword in node and (same in node or allows_any(node[keyword])):
            value = node.pop(keyword)  # a value with a schema counts as evaluated
            if same == "additionalProperties":
                node.setdefault(same, value)  # keeps an object open that says so
        elif keyword in node and not node.keys() & evaluates:
            node[same] = node.pop(keyword)
    return node


def _names(node: dict[str, Any]) -> dict[str, Any]:
    """Replace `propertyNames` by patterns with the same meaning."""
    names = node.get("propertyNames")
    if names is None or allows_any(names) or (isinstance(names, Mapping) and _is_any_text(names)):
        node.pop("propertyNames", None)
        return node
    listed, others = node.get("properties", {}), node.get("additionalProperties", True)
    is_joined = node.keys() & (JOINS | {"patternProperties", "unevaluatedProperties"})
    if is_joined or not isinstance(listed, Mapping):
        return node
    allowed = _words(names)
    pattern = _pattern(names)
    if allowed is not None:
        if set(listed) - allowed:
            return node
        left = sorted(allowed - set(listed))
        pattern = "^(" + "|".join(map(_escaped, left)) + ")$" if left else None
    elif pattern is None or listed:
        return node
    node.pop("propertyNames")
    node["additionalProperties"] = False
    if pattern is not None and others is not False:
        node["patternProperties"] = {pattern: others}
    if allowed is not None and not set(node.get("required", ())) <= allowed:
        return {"enum": []}
    return node


def _escaped(text: str) -> str:
    return re.sub(r"[\\.^$*+?()\[\]{}|/-]", r"\\\g<0>", text)


def _is_any_text(names: Mapping[str, Any]) -> bool:
    own = names.keys() - ANNOTATIONS
    takes_text = "string" in (named_types(names) or {"string"})
    return own <= {"type", "minLength"} and takes_text and not names.get("minLength")


def _words(names: Any) -> set[str] | None:
    if names is False:
        return set()
    if not isinstance(names, Mapping) or names.keys() - ANNOTATIONS - {"type", "enum", "const"}:
        return None
    listed = [names["const"]] if "const" in names else names.get("enum")
    return {each for each in listed if isinstance(each, str)} if isinstance(listed, list) else None


def _pattern(names: Any) -> str | None:
    if not isinstance(names, Mapping) or "string" not in (named_types(names) or {"string"}):
        return None
    own = names.keys() - ANNOTATIONS - {"type"}
    if own == {"pattern"} and isinstance(names["pattern"], str):
        return str(names["pattern"])
    if own and own <= {"minLength", "maxLength"}:
        return f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None


OPEN = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"})
"""Keywords about properties that are not listed."""
JOINED = frozenset(
    words("allOf anyOf oneOf not if then else $ref dependentSchemas dependentRequired dependencies")
)
"""Keywords that apply more than one schema to the same object."""
RESTRICTING = (
    OPEN
    | JOINED
    | frozenset(
        words(
            "type enum const required properties minProperties maxProperties items prefixItems contains minContains maxContains minItems"
            " maxItems uniqueItems unevaluatedItems minLength maxLength pattern format minimum maximum multipleOf exclusiveMinimum"
            " exclusiveMaximum"
        )
    )
)
"""Keywords that restrict a value."""
FORMATS = frozenset(words("date-time time date duration email hostname ipv4 ipv6 uuid uri unknown"))
"""The formats that llguidance enforces; it refuses others."""
NOT_ALONE = words("not if then else contains propertyNames unevaluatedProperties unevaluatedItems")
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
