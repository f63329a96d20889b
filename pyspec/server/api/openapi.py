"""`/openapi.json`, built from the request models: request bodies, and the error statuses of each path."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import pyspec
from pyspec.server.api.anthropic import MessagesBody
from pyspec.server.api.responses import ResponsesBody
from pyspec.server.api.schema import (
    ChatBody,
    DetokenizeBody,
    InfillBody,
    NativeBody,
    TemplateBody,
    TextBody,
    TokenizeBody,
)
from pyspec.server.api.slots import SlotFileBody

POSTS: dict[str, tuple[type[BaseModel], str, tuple[str, ...]]] = {
    "/v1/chat/completions": (ChatBody, "Answer a chat (OpenAI)", ("choices", "usage", "timings")),
    "/v1/completions": (TextBody, "Continue a prompt (OpenAI)", ("choices", "usage")),
    "/completion": (NativeBody, "Continue a prompt (llama-server)", ()),
    "/infill": (InfillBody, "Fill a gap in a text (llama-server)", ()),
    "/v1/chat/completions/input_tokens": (ChatBody, "Count the tokens of a chat", ("input_tokens",)),
    "/v1/messages": (MessagesBody, "Answer a chat (Anthropic)", ("content", "stop_reason", "usage")),
    "/v1/messages/count_tokens": (
        MessagesBody,
        "Count the tokens of a chat (Anthropic)",
        ("input_tokens",),
    ),
    "/v1/responses": (ResponsesBody, "Answer a chat (OpenAI's responses)", ("id", "output", "usage")),
    "/v1/responses/input_tokens": (
        ResponsesBody,
        "Count the tokens of a chat (OpenAI's responses)",
        ("input_tokens",),
    ),
    "/slots/{slot}": (SlotFileBody, "Save, restore or erase a slot's contents", ("id_slot",)),
    "/tokenize": (TokenizeBody, "Text to token ids", ("tokens",)),
    "/detokenize": (DetokenizeBody, "Token ids to text", ("content",)),
    "/apply-template": (TemplateBody, "Render a chat to its prompt", ("prompt",)),
}
PARAMETERS = {
    "/slots/{slot}": [
        {
            "name": "slot",
            "in": "path",
            "required": True,
            "schema": {"type": "integer", "minimum": 0},
        },
        {
            "name": "action",
            "in": "query",
            "required": True,
            "schema": {"type": "string", "enum": ["save", "restore", "erase"]},
        },
    ]
}
GENERATE = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/completion",
        "/infill",
        "/v1/messages",
        "/v1/responses",
    }
)
GETS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "/health": ("Is the engine alive", "application/json", (503,)),
    "/ready": ("Would new work be served soon", "application/json", (401, 503)),
    "/v1/models": ("The model and its drafter", "application/json", ()),
    "/props": ("Settings and model facts", "application/json", (401, 501)),
    "/slots": ("The state of every slot", "application/json", (401, 501, 503)),
    "/metrics": ("Counters for Prometheus", "text/plain", (401, 501)),
    "/version": ("The version of pyspec (vLLM)", "application/json", (401,)),
    "/load": ("Requests that run and wait (vLLM)", "application/json", (401,)),
    "/get_load": ("Requests and tokens that are held (SGLang)", "application/json", (401,)),
    "/get_server_info": ("Settings and rates (SGLang); /server_info, too", "application/json", (401,)),
    "/get_model_info": ("The served model (SGLang); /model_info, too", "application/json", (401,)),
    "/openapi.json": ("This document", "application/json", (401,)),
}
ERRORS = {
    400: "The request cannot be served as it stands; the message names the field",
    401: "No api key, or a wrong one",
    403: "Sent by a page of another site",
    404: "No such path",
    405: "The path does not take this method",
    408: "The body did not arrive in time",
    413: "The body is too large",
    429: "Too many requests wait; Retry-After says when to come back",
    500: "The server failed",
    501: "Switched off",
    503: "Loading, shutting down or stopped",
    529: "Loading, shutting down or stopped",
}
BODY_ERRORS = (400, 401, 403, 405, 408, 413, 429, 500, 503)
ANTHROPIC_ERRORS = (400, 401, 403, 405, 408, 413, 429, 500, 529)
ANTHROPIC_ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "type"],
            "properties": {
                "code": {"type": "integer"},
                "message": {"type": "string"},
                "type": {"type": "string"},
                "n_prompt_tokens": {"type": "integer"},
                "n_ctx": {"type": "integer"},
            },
        }
    },
}


@cache
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    models = {model for model, *_ in POSTS.values()}
    refs, defs = models_json_schema(
        [(model, "validation") for model in sorted(models, key=lambda m: m.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    schemas = {**defs["$defs"], "Error": ERROR_SCHEMA, "AnthropicError": ANTHROPIC_ERROR_SCHEMA}
    paths: dict[str, Any] = {}
    for path, (about, content_type, codes) in GETS.items():
        shape = {"type": ["object", "array", "string"]}
        paths[path] = {"get": _operation(about, content_type, shape, codes)}
    alive = {"200": {"description": "OK, without a text"}}
    alive["503"] = _operation("", "", {}, (503,))["responses"]["503"]
    ping = {"summary": "Is the engine alive (vLLM)", "responses": alive}
    paths["/ping"] = {"get": ping, "post": ping}
    json_type = "application/json"
    for path, (model, about, fields) in POSTS.items():
        shape = {"type": ["object", "array"], "required": list(fields)}
        if model is MessagesBody:
            operation = _operation(about, json_type, shape, ANTHROPIC_ERRORS, "AnthropicError")
        else:
            operation = _operation(about, json_type, shape, BODY_ERRORS)
        if path in GENERATE:
            events = "Server-sent events, with stream: true"
            operation["responses"]["200"]["content"]["text/event-stream"] = {
                "schema": {
                    "type": "object",
                    "description": events,
                    "required": ["data"],
                    "properties": {"data": {"type": "string"}},
                }
            }
        schema = refs[(model, "validation")]
        content = {"application/json": {"schema": schema}}
        operation["requestBody"] = {"required": True, "content": content}
        if path in PARAMETERS:
            operation["parameters"] = PARAMETERS[path]
        paths[path] = {"post": operation}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pyspec",
            "version": pyspec.__version__,
            "description": "Speculative decoding for GGUF.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(
    about: str,
    content_type: str,
    schema: dict[str, Any],
    codes: tuple[int, ...],
    error_schema: str = "Error",
) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error_schema}"}}}
    content = {content_type: {"schema": schema}}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
    for code in codes:
        responses[str(code)] = {"description": ERRORS[code], "content": error}
    return {"summary": about, "responses": responses}
