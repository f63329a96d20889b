"""CORS: origins whose pages may read answers, as in llama-server.

A preflight is always answered with 200; the headers grant or omit permissions. Starlette's middleware answers a refused one with 400.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "*, Authorization",  # the star does not cover it
    "Access-Control-Max-Age": "600",
}


class Cors:
    """Adds CORS headers for known origins."""

    def __init__(self, app: ASGIApp, is_known: Callable[[str], bool]) -> None:
        self._app, self._is_known = app, is_known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin", "")
        if not origin:
            await self._app(scope, receive, send)
            return
        own = self._headers_for(origin)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            answer = own | PREFLIGHT if "Access-Control-Allow-Origin" in own else own
            await Response(headers=answer)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(own)
            await send(message)

        await self._app(scope, receive, with_headers)

    def _headers_for(self, origin: str) -> dict[str, str]:
        if not self._is_known(origin):
            return {"Vary": "Origin"}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Credentials": "true",
            "Vary": "Origin",
        }
