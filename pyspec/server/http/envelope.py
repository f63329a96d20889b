"""Errors as clients see them: `{"error": {"code", "message", "type"}}`, llama-server's shape, on every path but Anthropic's.

A `PyspecError` brings its own status and type. Whatever else escapes a handler is a bug of ours: it becomes a bare 500
and its traceback goes to the log.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pyspec.errors import PromptTooLong, PyspecError, QueueFull
from pyspec.ranges import printable

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    414: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
    505: "invalid_request_error",
    507: "server_error",
}


MOST_SHOWN, MOST_METHOD = 200, 20  # characters of a path and of a method that an answer or the log repeats
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    529: "overloaded_error",
}


class Refused(PyspecError):
    """Turned away by HTTP itself: too large, too slow, no key, a foreign page."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = TYPES[status]


class JSON(Response):
    """A JSON answer. NaN or infinity in it would be a bug of ours and raises."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content).encode("utf-8", "replace")  # a file's name may be no text


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def dumps(value: Any) -> str:
    """Compact JSON, UTF-8 kept as it is. The encoder is made once: every chunk of every stream comes through here."""
    return _ENCODER.encode(value)


def error_body(error: PyspecError) -> dict[str, Any]:
    """The envelope for one error."""
    inner: dict[str, Any] = {"code": error.status, "message": str(error), "type": error.kind}
    if isinstance(error, PromptTooLong):
        inner |= {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx}
    return {"error": inner}


def anthropic_error(status: int, message: str) -> tuple[int, dict[str, Any]]:
    """Status and envelope of an error as Anthropic's clients know them: what passes by itself is 529."""
    status = 529 if status == 503 else status
    inner = {"type": ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")}
    return status, {"type": "error", "error": inner | {"message": message}}


def error_response(path: str, error: PyspecError, headers: dict[str, str] | None = None) -> Response:
    """An error in the words of the interface that the path belongs to."""
    if path.endswith((ANTHROPIC_PATH, f"{ANTHROPIC_PATH}/count_tokens")):
        status, body = anthropic_error(error.status, str(error))
        return JSON(body, status_code=status, headers=headers)
    return JSON(error_body(error), status_code=error.status, headers=headers)


async def on_error(request: Request, error: Exception) -> Response:
    """Answer a PyspecError."""
    assert isinstance(error, PyspecError)
    headers = {}
    if error.status == 429:
        headers["Retry-After"] = str(error.retry_after_s if isinstance(error, QueueFull) else 1)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (408, 413):  # the body was not read to its end
        headers["Connection"] = "close"
    return error_response(request.url.path, error, headers)


class _Said(PyspecError):
    """What the framework refuses, or a bug: an error with a status of its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, TYPES.get(status, "server_error")


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer a route or method that does not exist."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    path = printable(request.url.path, MOST_SHOWN)
    what = {404: f"no such path: {path}", 405: f"{path} does not take {printable(request.method, MOST_METHOD)}"}
    message = what.get(status, HTTPStatus(status).phrase.lower())
    return error_response(request.url.path, _Said(status, message), dict(error.headers or {}))


async def on_bug(request: Request, error: Exception) -> Response:
    """Answer anything else; the framework logs the traceback and raises on."""
    return error_response(request.url.path, _Said(500, "the server failed on this request; its log says why"))
