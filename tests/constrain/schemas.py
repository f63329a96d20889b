"""Random JSON Schemas as programs send them: objects with required and optional fields, lists, enums, unions, bounds, references."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("name", "age", "tags", "city", "is_open", "größe", "a b", 'quo"te', "x")


def schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "bounded", "pattern"]
    if depth:
        kinds += ["object", "array", "union", "object", "map", "tuple"]
    return MAKERS[rng.choice(kinds)](rng, depth)


def whole(rng: random.Random) -> dict[str, Any]:
    """A schema with definitions, as the root of a request."""
    root = {"type": "object", **_object(rng, 3)}
    if rng.random() < 0.3:
        root["$defs"] = {"part": schema(rng, 1)}
        root["properties"]["part"] = {"$ref": "#/$defs/part"}
        root["required"] = [*root["required"], "part"]
    return root


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _bounded(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 100)},
            {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 9)},
            {"type": "number", "minimum": low, "maximum": low + 10},
        ]
    )


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": schema(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}  # fmt: skip


MAKERS: dict[str, Any] = {
    "string": lambda rng, depth: {"type": "string", "maxLength": 12},
    "integer": lambda rng, depth: {"type": "integer", "minimum": -9999, "maximum": 9999},
    "number": lambda rng, depth: {"type": "number", "minimum": 0, "maximum": 1},
    "boolean": lambda rng, depth: {"type": "boolean"},
    "null": lambda rng, depth: {"type": "null"},
    "enum": lambda rng, depth: {"enum": rng.sample(["red", "grün", 1, 2.5, None, True, 'a"b', "\\"], 3)},
    "const": lambda rng, depth: {"const": rng.choice(["fixed", 7, None, "ä\n"])},
    "pattern": lambda rng, depth: {"type": "string", "pattern": rng.choice(["^[a-z]{2,6}$", "^[0-9]{4}-[0-9]{2}$", "^(on|off)$"])},
    "bounded": _bounded,
    "object": _object,
    "array": _array,
    "union": lambda rng, depth: {"anyOf": [schema(rng, depth - 1), schema(rng, depth - 1)]},
    "map": lambda rng, depth: {
        "type": "object",
        "patternProperties": {"^[a-z]{1,6}$": schema(rng, 0)},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "tuple": lambda rng, depth: {"type": "array", "prefixItems": [schema(rng, 0), schema(rng, 0)], "items": False, "minItems": 2},
}  # fmt: skip
