"""Errors in clients' form: `{"error": {"code", "message", "type"}}`, llama-server's shape, on every path except Anthropic's.

A `PyspecError` has its own status and type. Any other exception of a handler is a bug of pyspec: the answer is a bare 500, and the
traceback goes to the log.
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

TYPES = dict.fromkeys((400, 405, 408, 413, 414, 431, 505), "invalid_request_error") | {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
    507: "server_error",
}
# characters of a path and of a method that answers and logs repeat
MOST_SHOWN, MOST_METHOD = 200, 20
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
    """Refused by HTTP itself: too large, too slow, no key, a page of another site; or an error of the framework, or a bug."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, TYPES.get(status, "server_error")


class JSON(Response):
    """A JSON answer. NaN or infinity in it is a bug of pyspec and raises."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content).encode("utf-8", "replace")  # a file's name may be no text


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def dumps(value: Any) -> str:
    """Compact JSON with UTF-8 unescaped. The encoder is built once because every chunk of every stream uses it."""
    return _ENCODER.encode(value)


def error_body(error: PyspecError) -> dict[str, Any]:
    """The envelope for one error."""
    inner: dict[str, Any] = {"code": error.status, "message": str(error), "type": error.kind}
    if isinstance(error, PromptTooLong):
        inner |= {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx}
    return {"error": inner}


def anthropic_error(error: PyspecError) -> tuple[int, dict[str, Any]]:
    """Status and envelope of an error in Anthropic's form: temporary failures are 529.

    A prompt that is too long is told in the words for which its clients look.
    """
    status, message = error.status, str(error)
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {error.n_prompt} tokens > {error.n_ctx} maximum; {message}"
    status = 529 if status == 503 else status
    other = "invalid_request_error" if status < 500 else "api_error"
    inner = {"type": ANTHROPIC_TYPES.get(status, other)}
    return status, {"type": "error", "error": inner | {"message": message}}


def error_response(
    path: str,
    error: PyspecError,
    headers: dict[str, str] | None = None,
) -> Response:
    """An error in the form of the API that the path belongs to."""
    if path.endswith((ANTHROPIC_PATH, f"{ANTHROPIC_PATH}/count_tokens")):
        status, body = anthropic_error(error)
        return JSON(body, status_code=status, headers=headers)
    return JSON(error_body(error), status_code=error.status, headers=headers)


def error_event(path: str, error: PyspecError) -> bytes:
    """An error as the only event of a stream, in the form of the API that the path belongs to."""
    is_openai = path.endswith(("/v1/completions", "/chat/completions"))
    body, end = error_body(error), "data: [DONE]\n\n" if is_openai else ""
    if path.endswith(ANTHROPIC_PATH):
        body = anthropic_error(error)[1]
    elif path.endswith("/responses"):
        body |= {
            "type": "error",
            "sequence_number": 0,
            "param": None,
            "code": error.kind,
            "message": str(error),
        }
    name = "event: error\n" if "type" in body else ""
    return f"{name}data: {dumps(body)}\n\n{end}".encode()


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


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer a route or method that does not exist."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    path = printable(request.url.path, MOST_SHOWN)
    method = printable(request.method, MOST_METHOD)
    what = {404: f"no such path: {path}", 405: f"{path} does not take {method}"}
    message = what.get(status, HTTPStatus(status).phrase.lower())
    headers = dict(error.headers or {})
    return error_response(request.url.path, Refused(status, message), headers)


async def on_bug(request: Request, error: Exception) -> Response:
    """Answer any other exception; the framework logs the traceback and re-raises."""
    failure = Refused(500, "the server failed on this request; its log says why")
    return error_response(request.url.path, failure)
