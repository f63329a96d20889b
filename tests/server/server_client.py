"""Helpers of the server's tests: a client without a socket, and a server-sent-events parser."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.applications import Starlette

from pyspec.server.app import create_app
from pyspec.server.engine import EngineLike
from pyspec.server.settings import ServerSettings


class App:
    """Synchronous calls into an ASGI application; a bug behind a 500 raises here."""

    def __init__(self, app: Starlette, headers: dict[str, str] | None = None) -> None:
        self._app = app
        self._headers = headers or {}

    def call(self, method: str, path: str, **request: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            async with self._client() as client:
                return await client.request(method, path, **request)

        return asyncio.run(go())

    @asynccontextmanager
    async def _client(self) -> Any:
        transport = httpx.ASGITransport(app=self._app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", headers=self._headers
        ) as client:
            yield client

    def get(self, path: str, **request: Any) -> httpx.Response:
        return self.call("GET", path, **request)

    def post(self, path: str, body: Any = None, **request: Any) -> httpx.Response:
        return (
            self.call("POST", path, json=body, **request)
            if body is not None
            else self.call("POST", path, **request)
        )

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        response = self.post(path, body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(parse_events(response.content))

    def named_events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Events of a stream in which each has its type as its name."""
        response = self.post(path, body | {"stream": True})
        assert response.status_code == 200, response.text
        found = []
        for block in response.text.strip().split("\n\n"):
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found


def app_of(engine: EngineLike, **settings: Any) -> App:
    """A server of an engine."""
    return App(create_app(engine, ServerSettings(**settings)))


def refusal(response: httpx.Response, status: int = 400) -> str:
    """The message of a refusal with this status."""
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


def parse_events(raw: bytes) -> Iterator[Any]:
    """Data of each event, fed a byte at a time as a slow wire would; JSON decoded, [DONE] as it is."""
    line, data = bytearray(), bytearray()
    for byte in raw:
        if byte != 10:
            line.append(byte)
            continue
        text = bytes(line)
        line.clear()
        if text.startswith(b"data: "):
            data += text[6:]
        elif text.startswith(b":"):
            continue
        elif text == b"":
            if data:
                yield "[DONE]" if data == b"[DONE]" else json.loads(data)
            data.clear()
        else:
            raise AssertionError(f"no such line in an event stream: {text!r}")
    assert not line and not data, "the stream ends inside an event"
