"""Objects that list their properties are closed if that is safe, and nothing else of a schema changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pyspec.text.markup.call_grammar import Lark
from pyspec.text.markup.dialect import dialect
from pyspec.text.schemas import closed

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = A | {"additionalProperties": False}


def kind(name: str, also: str = "a") -> dict[str, Any]:
    """An object that its kind distinguishes from others."""
    return {"type": "object", "properties": {"kind": {"const": name}, also: {}}, "required": ["kind"]}


SHUT = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED),
        ({"properties": {"x": A}, "required": ["x"]}, None),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED}),
        ({"prefixItems": [A, True]}, {"prefixItems": [CLOSED, True]}),
        ({"type": ["object", "null"], "properties": {}}, None),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [A], "title": "one"}, {"allOf": [CLOSED], "title": "one"}),
        ({"additionalProperties": A}, {"additionalProperties": CLOSED}),
        ({"$ref": "#/$defs/a", "$defs": {"a": A}}, {"$ref": "#/$defs/a", "$defs": {"a": CLOSED}}),
        ({"oneOf": [kind("x"), kind("y")]}, {"anyOf": [kind("x") | SHUT, kind("y") | SHUT]}),
        (
            {
                "oneOf": [
                    A | {"required": ["a"]},
                    {"type": "object", "properties": {"b": {}}, "required": ["b"]},
                ]
            },
            {
                "anyOf": [
                    CLOSED | {"required": ["a"]},
                    {"type": "object", "properties": {"b": {}}, "required": ["b"]} | SHUT,
                ]
            },
        ),
        ({"type": "string", "format": "binary"}, {"type": "string"}),
        ({"enum": [{"format": "binary"}], "format": "uuid"}, {"enum": [{"format": "binary"}], "format": "uuid"}),
        ({"properties": {"properties": A}}, {"properties": {"properties": CLOSED}, "additionalProperties": False}),
    ],
)  # fmt: skip
def test_an_object_that_lists_its_properties_is_closed(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    found = closed(schema)
    if expected is None:
        assert found["additionalProperties"] is False
    else:
        assert found == expected
    assert json.dumps(schema) == before, "the schema that was given is not touched"


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        A | {"additionalProperties": True},
        A | {"additionalProperties": {"type": "string"}},
        A | {"patternProperties": {"^x": {}}},
        A | {"propertyNames": {"pattern": "^a"}},
        A | {"required": ["a", "b"]},
        A | {"minProperties": 2},
        A | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"allOf": [A, {"properties": {"b": {}}}]},
        {"oneOf": [A, {"type": "object", "properties": {"b": {}}}]},
        {"oneOf": [A | {"required": ["a"]}, {"type": "object", "properties": {"b": {}}}]},
        {"not": A},
        {"if": A, "then": {"properties": {"b": {}}}},
        {"contains": A},
        {"properties": {"x": {}}, "allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": A}},
        {"$ref": "#/$defs/a", "properties": {"b": {}}, "$defs": {"a": A}},
        {"enum": [{"properties": {"a": 1}}], "default": A, "examples": [A]},
    ],
)
def test_open_or_joined_objects_stay_unchanged(schema: Any) -> None:
    assert closed(schema) == schema


def test_a_definition_is_closed_only_if_it_stands_alone_everywhere() -> None:
    schema = {
        "properties": {"x": {"$ref": "#/$defs/base"}, "y": {"$ref": "#/$defs/own"}},
        "$defs": {"base": A, "own": A | {"title": "own"}, "more": {"allOf": [{"$ref": "#/$defs/base"}, {"required": ["b"]}]}},
    }  # fmt: skip
    assert closed(schema)["$defs"]["base"] == CLOSED, "what nobody asks for counts for nothing"
    schema["properties"]["z"] = {"$ref": "#/$defs/more"}
    found = closed(schema)
    assert found["$defs"]["base"] == A and found["$defs"]["own"]["additionalProperties"] is False
    assert found["additionalProperties"] is False


def test_a_schema_that_holds_itself_is_closed_once() -> None:
    tree = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]}  # fmt: skip
    assert closed(tree) == tree | {"additionalProperties": False}


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "deepseek_v3", "kimi_k2"])
def test_calls_written_as_json_have_the_arguments_of_their_tool_and_no_others(name: str) -> None:
    speaks, lark = dialect(name), Lark()
    for source in (
        lark.calls(speaks.rules(lark, {"f": A}, is_single=True)),
        speaks.in_place({"f": A}, is_single=True, control={})[0],
    ):
        assert json.dumps(CLOSED)[1:-1] in source


def test_a_oneof_whose_parts_are_needed_open_elsewhere_is_left_to_others() -> None:
    more = {"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"z": {}}}]}
    parts = {"a": A | {"required": ["a"]}, "b": {"type": "object", "properties": {"b": {}}, "required": ["b"]}}  # fmt: skip
    schema = {"properties": {"x": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}, "y": more}, "$defs": parts}  # fmt: skip
    assert closed(schema)["properties"] == schema["properties"]
    assert closed(schema)["$defs"]["a"] == parts["a"]
