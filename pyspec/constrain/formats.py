"""Grammars of OpenAI's `response_format`, and of JSON Schemas as clients send them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pyspec.errors import RequestError
from pyspec.request import Grammar

JSON_OBJECT = Grammar(kind="json_schema", source='{"type": "object"}')


def format_grammar(value: Any) -> Grammar | None:
    """The grammar of a `response_format`; None for text. Raises RequestError."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        found = type(value).__name__
        raise RequestError(f"response_format: want an object with a type, not {found}")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        if schema is None or schema == {}:
            return JSON_OBJECT
        return schema_grammar("response_format.schema", schema)
    if kind == "json_schema":
        holder = value.get("json_schema", value)
        if not isinstance(holder, Mapping):
            raise RequestError("response_format.json_schema: want an object that holds the schema")
        schema = {} if holder.get("schema") is None else holder["schema"]
        return schema_grammar("response_format.json_schema.schema", schema)
    known = "text, json_object, json_schema"
    raise RequestError(f"response_format.type: {str(kind)[:40]!r} is none of {known}")


def schema_grammar(name: str, value: Any) -> Grammar:
    """The grammar of a schema, sent as JSON or, as by vLLM's clients, as text with JSON. Raises RequestError that names the field."""
    if isinstance(value, str):
        return Grammar(kind="json_schema", source=value)
    if not isinstance(value, Mapping | bool):
        raise RequestError(f"{name}: a JSON Schema is an object")
    try:
        return Grammar(kind="json_schema", source=json.dumps(value))
    except (TypeError, ValueError, RecursionError) as e:
        raise RequestError(f"{name} is not JSON: {e}") from None
