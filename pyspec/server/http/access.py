"""One log line for each request: method, path, status, time, client and an id that the answer carries, too."""

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
"""Paths that are asked all the time: told at debug level if they say yes, or not now."""
MOST_LINES = 50  # a second; what is beyond is counted
ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")


class AccessLog:
    """Passes requests on and tells of them when they are over. A flood does not fill the disk: its lines are counted, not written."""

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
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            if log.isEnabledFor(logging.INFO):
                self._tell(scope, status, 1e3 * (time.perf_counter() - began), request_id)

    def _tell(self, scope: Scope, status: int, ms: float, request_id: str) -> None:
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
            "client": client[0] if client else "unix",
            "request_id": request_id,
        }
        text = "%(method)s %(path)s %(status)d %(ms).1f ms %(client)s %(request_id)s"
        log.log(level, text, fields, extra={"fields": fields})

    def _has_room(self) -> bool:
        """Whether this second may have another line."""
        second = int(time.monotonic())
        if second != self._second:
            if self._n_left_out:
                fields = {"event": "requests_left_out", "count": self._n_left_out}
                log.info("%d requests more, without lines of their own", self._n_left_out, extra={"fields": fields})
            self._second, self._n_line, self._n_left_out = second, 0, 0
        self._n_line += 1
        self._n_left_out += self._n_line > MOST_LINES
        return self._n_line <= MOST_LINES


def _request_id(scope: Scope) -> str:
    """The client's own, if it is fit to be written down, or a new one."""
    for name, value in scope.get("headers", ()):
        if name == b"x-request-id" and ID.fullmatch(value):
            return value.decode()
    return uuid4().hex[:16]
