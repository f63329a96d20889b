"""`/openapi.json`, built from the endpoints and their request models: request bodies, and the error statuses of each path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.types import ASGIApp

import pyspec
from pyspec.server.api.anthropic import MessagesBody

Handler = Callable[[Any, Request], Awaitable[ASGIApp]]
"""Gets the Service, or the Router of several models, with each request."""
JSON_TYPE = "application/json"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Paths with one handler, the first of which the document shows if `about` says what it is for.

    body     the model of its body: the method is then POST
    fields   that every answer has
    errors   statuses besides 200; of a path with a body all that a body can have
    streams  it answers with events, too, if the body asks for them
    """

    paths: tuple[str, ...]
    handler: Handler
    methods: tuple[str, ...]
    about: str = ""
    body: type[BaseModel] | None = None
    fields: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    content_type: str = JSON_TYPE
    streams: bool = False
    parameters: tuple[dict[str, Any], ...] = ()


def get(
    paths: str, handler: Handler, about: str = "", errors: tuple[int, ...] = (), **more: Any
) -> Endpoint:
    """An endpoint that shows something. paths: between spaces"""
    given = {"methods": ("GET",), **more}
    return Endpoint(paths=tuple(paths.split()), handler=handler, about=about, errors=errors, **given)


def post(
    paths: str, handler: Handler, body: type[BaseModel], about: str, *fields: str, **more: Any
) -> Endpoint:
    """An endpoint that takes a body. paths: between spaces"""
    errors = ANTHROPIC_ERRORS if body is MessagesBody else BODY_ERRORS
    return Endpoint(
        paths=tuple(paths.split()),
        handler=handler,
        methods=("POST",),
        about=about,
        body=body,
        fields=fields,
        errors=errors,
        **more,
    )


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


class ErrorDetails(BaseModel):
    """An error as llama-server tells it. The numbers are there if the prompt was too long."""

    code: int
    message: str
    type: str
    n_prompt_tokens: int = 0
    n_ctx: int = 0


class Error(BaseModel):
    error: ErrorDetails


class AnthropicErrorDetails(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetails


EVENTS = {
    "type": "object",
    "description": "Server-sent events, with stream: true",
    "required": ["data"],
    "properties": {"data": {"type": "string"}},
}


def document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    shown = [endpoint for endpoint in endpoints if endpoint.about]
    models: set[type[BaseModel]] = {Error, AnthropicError}
    models |= {endpoint.body for endpoint in shown if endpoint.body is not None}
    refs, defs = models_json_schema(
        [(model, "validation") for model in sorted(models, key=lambda m: m.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for one in shown:
        operation = _operation(one)
        if one.body is not None:
            content = {JSON_TYPE: {"schema": refs[(one.body, "validation")]}}
            operation["requestBody"] = {"required": True, "content": content}
        for path in one.paths[:1]:
            known = paths.setdefault(path, {})
            known |= {method.lower(): operation for method in one.methods if method.lower() not in known}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pyspec",
            "version": pyspec.__version__,
            "description": "Speculative decoding for GGUF.",
        },
        "paths": paths,
        "components": {
            "schemas": defs["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(one: Endpoint) -> dict[str, Any]:
    name = "AnthropicError" if one.body is MessagesBody else "Error"
    error = {JSON_TYPE: {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    shape: dict[str, Any] = {"type": ["object", "array", "string"]}
    if one.body is not None:
        shape = {"type": ["object", "array"], "required": list(one.fields)}
    answer: dict[str, Any] = {"description": "OK, without a text"}
    if one.content_type:
        content = {one.content_type: {"schema": shape}}
        events = {"text/event-stream": {"schema": EVENTS}} if one.streams else {}
        answer = {"description": "OK", "content": content | events}
    responses = {str(code): {"description": ERRORS[code], "content": error} for code in one.errors}
    operation: dict[str, Any] = {"summary": one.about, "responses": {"200": answer} | responses}
    return operation | ({"parameters": list(one.parameters)} if one.parameters else {})
