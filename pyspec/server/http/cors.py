"""Which pages of other origins may read answers: CORS, as llama-server has it.

A preflight is answered with 200 whoever asks: what an origin may is in the headers, or is not. Starlette's middleware refuses it with 400.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "*, Authorization",  # which the star does not cover
    "Access-Control-Max-Age": "600",
}


class Cors:
    """Adds the headers of CORS for origins that are known."""

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
            await Response(headers=own | PREFLIGHT if "Access-Control-Allow-Origin" in own else own)(
                scope, receive, send
            )
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(own)
            await send(message)

        await self._app(scope, receive, with_headers)

    def _headers_for(self, origin: str) -> dict[str, str]:
        if not self._is_known(origin):
            return {"Vary": "Origin"}
        return {"Access-Control-Allow-Origin": origin, "Access-Control-Allow-Credentials": "true", "Vary": "Origin"}
