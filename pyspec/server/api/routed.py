"""A request to one of several models: its model is found, claimed for as long as its answer lasts, and loaded first if need be."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyspec.errors import PyspecError, RequestError
from pyspec.server.api.openapi import Endpoint
from pyspec.server.http.body import ClientGone, parse_object, read_body
from pyspec.server.http.envelope import error_event
from pyspec.server.models.router import Router
from pyspec.server.resume import ReplayStream, session_key
from pyspec.server.service import LARGE_BODY
from pyspec.server.stream import HEADERS, disconnected, stop_task, while_connected

PING_S = 5.0  # a stream that waits for its model sends a comment each so often
SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def keep_alive_of(value: Any) -> float | None:
    """ollama's `keep_alive` in seconds: a number, "5m" or "1h30m"; below 0: for ever. None: not given. Raises RequestError."""
    if value is None:
        return None
    number, said = r"[0-9]{1,12}(?:\.[0-9]{0,9})?", str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(f"-?({number}|({number}(ms|[smh]))+)", said):
        raise RequestError(
            f"keep_alive is {said[:40]!r}; want seconds, or a time such as 5m; -1: for ever"
        )
    parts = re.findall(f"({number})(ms|[smh]?)", said)
    found = sum(float(n) * SECONDS[unit] for n, unit in parts)
    return -found if said[0] == "-" else found


def autoload_of(router: Router, request: Request) -> bool:
    """Whether a request may load its model."""
    said = request.query_params.get("autoload")
    return router.options.models_autoload if said is None else said.lower() in ("1", "true")


async def routed(router: Router, request: Request, *, one: Endpoint) -> ASGIApp:
    """Answer with the service of the model that the request names: its body, or its query."""
    if request.method in ("GET", "HEAD"):
        name = router.find(request.query_params.get("model") or None, answers=True)
        return await one.handler(router.loaded(name), request)
    client = request.client.host if request.client is not None else ""
    raw = await read_body(request, router.settings.limits, router.reading, client)
    body: dict[str, Any] = {}
    if raw and len(raw) <= LARGE_BODY:
        body = parse_object(raw, router.settings.limits)
    elif raw:
        body = await asyncio.to_thread(parse_object, raw, router.settings.limits)
    name = router.find(body.get("model") or request.query_params.get("model"), answers=True)
    idle_s = keep_alive_of(body.get("keep_alive"))
    ticket, ready = router.claim(name, idle_s, autoload_of(router, request))
    end = partial(router.end, ticket)
    if ready.done():
        try:
            ready.result()
            app = await one.handler(router.loaded(name, was=True), again(request, raw, request.receive))
        except BaseException:
            end()
            raise
        return Claimed(app, end)
    streams = one.streams and body.get("stream") is True
    conversation = request.headers.get("x-conversation-id", "") if streams else ""
    try:
        if conversation:
            router.sessions.expect(session_key(conversation, request.headers, router.settings), ready)
    except BaseException:
        end()
        raise
    outlives = bool(conversation)

    async def answer() -> ASGIApp:
        await ready
        service = router.loaded(name, was=True)
        return await one.handler(service, again(request, raw, never if outlives else request.receive))

    coming = Coming(asyncio.ensure_future(answer()), end, outlives)
    try:
        first = asyncio.wait({coming.task}, timeout=PING_S if streams else None)
        await while_connected(first, request.receive)
        return Claimed(coming.task.result(), end) if coming.task.done() else WaitingStream(coming)
    except BaseException:
        coming.leave()
        raise


@dataclass(frozen=True)
class Coming:
    """An answer that waits for its model. outlives: it is a stream that its client may come back to"""

    task: asyncio.Task[ASGIApp]
    end: Callable[[], None]
    outlives: bool

    def leave(self) -> None:
        """Cancel the answer, unless it outlives its client. `end` is called when it is over."""
        if not self.outlives:
            self.task.cancel()
        self.task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[ASGIApp]) -> None:
        app = None if task.cancelled() or task.exception() is not None else task.result()
        end_after(app, self.end)


def again(request: Request, raw: bytes, receive: Receive) -> Request:
    """A request whose body was read before."""
    first: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return Request(request.scope, replay)


async def never() -> Message:
    """Receive nothing more: the client may leave unnoticed."""
    await asyncio.Event().wait()
    raise AssertionError


class Claimed:
    """An answer whose model is claimed until it was sent; that of a stream that outlives its client, until that has ended."""

    def __init__(self, app: ASGIApp, end: Callable[[], None]) -> None:
        self._app, self._end = app, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            end_after(self._app, self._end)


def end_after(app: ASGIApp | None, end: Callable[[], None]) -> None:
    """Call `end` now, or when a stream that outlives its client has ended."""
    pump = app.pump if isinstance(app, ReplayStream) else None
    if pump is None or pump.done():
        end()
    else:
        pump.add_done_callback(lambda task: end())


class WaitingStream:
    """A stream that has begun before its model is loaded: comments, so that proxies stay, then the answer's events or its error."""

    def __init__(self, coming: Coming) -> None:
        self._coming = coming

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = self._coming.task
        left = asyncio.ensure_future(disconnected(receive))
        app: ASGIApp | None = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            while not task.done() and not left.done():
                await send(part(b": waiting for the model\n\n"))
                await asyncio.wait({task, left}, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return
            app = task.result()
        except PyspecError as e:
            await send(part(error_event(scope["path"], e), is_last=True))
        except ClientGone:  # the client has left
            pass
        finally:
            await stop_task(left)
            if app is None:
                self._coming.leave()
        if app is not None:
            await Claimed(app, self._coming.end)(scope, receive, without_head(send))


def part(data: bytes, *, is_last: bool = False) -> Message:
    """A part of a stream's body."""
    return {"type": "http.response.body", "body": data, "more_body": not is_last}


def without_head(send: Send) -> Send:
    """Pass on what follows the head of an answer."""

    async def passing(message: Message) -> None:
        if message["type"] != "http.response.start":
            await send(message)

    return passing
