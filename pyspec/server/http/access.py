"""One log line per request: method, path, status, time, client and the request's id, which the answer also carries."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import MutableMapping
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Receive, Scope, Send

from pyspec.ranges import printable
from pyspec.server.http.envelope import MOST_METHOD, MOST_SHOWN

log = logging.getLogger("pyspec.access")

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
            if log.isEnabledFor(logging.INFO):
                self._log(scope, status, 1e3 * (time.perf_counter() - began), request_id)

    def _log(self, scope: Scope, status: int, ms: float, request_id: str) -> None:
        is_polled = scope["path"] in POLLED and status in (200, 503)
        level = logging.DEBUG if is_polled else logging.INFO
        if not log.isEnabledFor(level) or not self._has_room():
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
        log.log(level, text, fields, extra={"fields": fields})

    def _has_room(self) -> bool:
        """True if this second may have another line."""
        second = int(time.monotonic())
        if second != self._second:
            if self._n_left_out:
                fields = {"event": "requests_left_out", "count": self._n_left_out}
                extra = {"fields": fields}
                log.info("%d more requests, not logged one by one", self._n_left_out, extra=extra)
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
