"""The application while the model is loading: answers "loading" on every path, then forwards to the real one."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

from starlette.applications import Starlette
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pyspec.errors import NotFound, Unavailable
from pyspec.progress import DOWNLOAD
from pyspec.ranges import printable
from pyspec.server.http.connections import ABSOLUTE
from pyspec.server.http.envelope import JSON, MOST_METHOD, MOST_SHOWN, error_body, error_response
from pyspec.server.http.gate import foreign_host
from pyspec.server.models.router import Router
from pyspec.server.page import loading_page
from pyspec.server.service import Service
from pyspec.server.settings import ServerSettings, address_of

# -- one line of the log for each request ----------------------------------------------------------------------------
# One log line per request: method, path, status, time, client and the request's id, which the answer also carries.

access_log = logging.getLogger("pyspec.access")

POLLED = frozenset({"/health", "/v1/health", "/ping", "/ready", "/metrics", "/slots"})
"""Paths that monitors poll: logged at debug level if the answer is a success or 503."""
MOST_LINES = 50  # lines per second; further requests are only counted
ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")


class AccessLog:
    """Forwards requests and logs them when they end. A flood cannot fill the disk: requests beyond the limit are counted, not logged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._second, self._n_line, self._n_left_out = 0, 0, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        request_id, status = _request_id(scope), 0

        async def noting(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (b"x-request-id", request_id.encode())
                message["headers"] = [*message.get("headers", ()), own]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            if access_log.isEnabledFor(logging.INFO):
                self._log(scope, status, 1e3 * (time.perf_counter() - began), request_id)

    def _log(self, scope: Scope, status: int, ms: float, request_id: str) -> None:
        is_polled = scope["path"] in POLLED and status in (200, 503)
        level = logging.DEBUG if is_polled else logging.INFO
        if not access_log.isEnabledFor(level) or not self._has_room():
            return
        client = scope.get("client")
        fields = {
            "event": "request",
            "method": printable(scope.get("method", ""), MOST_METHOD),
            "path": printable(scope["path"], MOST_SHOWN),
            "status": status,  # 0: the client left before an answer
            "ms": round(ms, 1),
            "client": (client[0] or "-") if client else "unix",
            "request_id": request_id,
        }
        text = "%(method)s %(path)s %(status)d %(ms).1f ms %(client)s %(request_id)s"
        access_log.log(level, text, fields, extra={"fields": fields})

    def _has_room(self) -> bool:
        """True if this second may have another line."""
        second = int(time.monotonic())
        if second != self._second:
            if self._n_left_out:
                fields = {"event": "requests_left_out", "count": self._n_left_out}
                extra = {"fields": fields}
                access_log.info("%d more requests, not logged one by one", self._n_left_out, extra=extra)
            self._second, self._n_line, self._n_left_out = second, 0, 0
        self._n_line += 1
        self._n_left_out += self._n_line > MOST_LINES
        return self._n_line <= MOST_LINES


def _request_id(scope: Scope) -> str:
    """The client's own id if it is safe to log, else a new one."""
    for name, value in scope.get("headers", ()):
        if name == b"x-request-id" and ID.fullmatch(value):
            return value.decode()
    return uuid4().hex[:16]


log = logging.getLogger(__name__)

FIRST_S = 2.0  # no lines for a load shorter than this
EVERY_S = 5.0  # between lines
DOWNLOAD_S = 30.0  # between lines of a download, in addition to one per tenth of the file
HEALTH = ("/health", "/v1/health")
LOADING = Unavailable("Loading model")  # llama-server's message: clients wait until it disappears


def in_origin_form(scope: Scope) -> Scope:
    """A request whose target is a complete address, as sent to a proxy ("GET http://host/health"). Every server has to accept it, and its host
    overrides the header (RFC 9112, 3.2.2). Only an address before percent-decoding counts."""
    target = scope.get("raw_path") or scope["path"].encode("latin-1", "replace")
    if not (found := ABSOLUTE.fullmatch(target)):
        return scope
    headers = [(b"host", found[1]), *(h for h in scope["headers"] if h[0] != b"host")]
    raw = found[2] or b"/"
    return {**scope, "path": unquote(raw.decode("latin-1")), "raw_path": raw, "headers": headers}


def with_address(scope: Scope) -> Scope:
    """The client is an address or nothing: a proxy passes on any text (X-Forwarded-For)."""
    host, port = scope.get("client") or (None, 0)
    if host is None:
        return scope
    return {**scope, "client": (str(address_of(host) or ""), port)}  # a zone of IPv6 is any text, too


class LoadLog:
    """Receives the progress of a load: shows it at /health and logs it from time to time."""

    def __init__(self, door: Door) -> None:
        self._door, self._due = door, time.monotonic() + FIRST_S
        self._tenth = (DOWNLOAD, 0)  # the last logged stage and tenth

    def __call__(self, stage: str, fraction: float) -> None:
        self._door.loading = {"stage": stage, "fraction": round(fraction, 3)}
        now, is_download = time.monotonic(), stage.startswith(DOWNLOAD)
        tenth = (stage, int(10 * fraction))
        if is_download and sys.stderr.isatty():  # the download library draws a bar there
            return
        if fraction < 1 and (now >= self._due or (is_download and tenth != self._tenth)):
            self._due = now + (DOWNLOAD_S if is_download else EVERY_S)
            self._tenth = tenth
            fields = {"event": "loading"} | self._door.loading
            log.info("loading: %s, %.0f %%", stage, 100 * fraction, extra={"fields": fields})


class Door:
    """The ASGI application before the real one exists. `app` may be set from any thread.

    All paths begin with the prefix of `settings`, "/llm", which is removed; other paths are not found.
    """

    def __init__(self, settings: ServerSettings, app: Starlette | None = None) -> None:
        self.app, self.settings = app, settings
        self.loading: dict[str, object] = {}  # "stage" and "fraction" of the current work
        self._prefix = settings.api_prefix
        self._logged = AccessLog(self._answer)

    @property
    def service(self) -> Service | Router | None:
        return None if self.app is None else self.app.state.service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await self._logged(with_address(in_origin_form(scope)), receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if (refusal := foreign_host(scope, self.settings)) is not None:
            await error_response(path, refusal)(scope, receive, send)
            return
        if self._prefix:
            if path == self._prefix:
                await RedirectResponse(f"{path}/", 308)(scope, receive, send)
                return
            if not path.startswith(f"{self._prefix}/"):
                error = NotFound(f"no such path: {path[:200]}; all begin with {self._prefix}")
                await error_response(path, error)(scope, receive, send)
                return
            path = path.removeprefix(self._prefix)
            scope = {**scope, "path": path, "raw_path": path.encode()}
        if self.app is not None:
            await self.app(scope, receive, send)
        elif path in HEALTH and self.loading:
            body = error_body(LOADING) | {"progress": self.loading}
            await JSON(body, LOADING.status)(scope, receive, send)
        elif path == "/" and scope["method"] in ("GET", "HEAD") and self.settings.page:
            await loading_page(self.loading, LOADING.status)(scope, receive, send)
        else:
            await error_response(path, LOADING)(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Run the lifespan protocol. The application starts later than its start-up event, so its shutdown is run here."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self.service is not None:
            self.service.shut_down()
        await send({"type": "lifespan.shutdown.complete"})
