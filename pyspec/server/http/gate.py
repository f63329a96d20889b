"""Access control: API keys, pages of other sites, CORS. Pure ASGI, so streams pass unchanged."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyspec.server.http.envelope import Refused, on_error
from pyspec.server.settings import ServerSettings, address_of, is_loopback

HAS_KEY = "pyspec.has_key"
"""Of a scope: the request may do all, also where it needs no key."""
PUBLIC = frozenset({"/", "/health", "/v1/health", "/ping", "/ready", "/models", "/v1/models"})
LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "*, Authorization",  # the star does not cover it
    "Access-Control-Max-Age": "600",
}


class Gate:
    """Refuses requests without a valid key, and requests that a page of another site sent.

    A browser lets any page post to this machine and only hides the answer. The generation costs the same, so a foreign Origin is refused
    before the work.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        # HTTP carries bytes: clients encode a non-ASCII key in UTF-8 or in Latin-1
        self._keys = [key.encode() for key in settings.api_keys]
        others = [key for key in settings.api_keys if not key.isascii() and max(key) < "\u0100"]
        self._keys += [key.encode("latin-1") for key in others]
        self._origins = frozenset(settings.cors_origins)
        self._is_local = all(map(is_loopback, settings.hosts))
        self._most_header = settings.limits.header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            if scope["type"] == "http":
                scope[HAS_KEY] = not self._keys or self._has_key(Headers(scope=scope))
            await self._app(scope, receive, send)
        else:
            response = await on_error(Request(scope), refusal)
            await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refused | None:
        headers = Headers(scope=scope)
        n = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if n > self._most_header:
            most = self._most_header
            return Refused(431, f"the headers have {n} bytes; at most {most} are taken")
        origin = headers.get("origin")
        is_write = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if origin and is_write and not self._is_known(origin, headers):
            why = f"pages of {origin[:80]} may not use this server; allow them with --cors-origin"
            return Refused(403, why)
        is_public = scope["path"] in PUBLIC and (not is_write or scope["path"] == "/ping")
        if self._keys and not is_public and not self._has_key(headers):
            return Refused(401, "invalid api key; send it as Authorization: Bearer KEY")
        return None

    def _is_known(self, origin: str, headers: Headers) -> bool:
        if "*" in self._origins or origin in self._origins or re.fullmatch(LOCAL_ORIGIN, origin):
            return True
        # Our own page under one of our names. Not if only this machine is served: a foreign name that resolves to it (DNS rebinding)
        # would pass for one.
        return not self._is_local and origin.split("://", 1)[-1] == headers.get("host")

    def _has_key(self, headers: Headers) -> bool:
        """Compare with every key, each in constant time, so that the duration reveals nothing."""
        given = key_of(headers)
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return any(matches)


class Cors:
    """Adds CORS headers for known origins, as llama-server does.

    A preflight is always answered with 200; the headers grant or omit permissions. Starlette's middleware answers a refused one with 400.
    """

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


def foreign_host(scope: Scope, settings: ServerSettings) -> Refused | None:
    """Refuse a request under a foreign name to a server that serves only this machine.

    A page whose foreign name resolves to this machine (DNS rebinding) would pass for a local one. An address is always typed by a user.
    With API keys the check is not needed, because such a page has none.
    """
    server = scope.get("server")
    is_local = all(map(is_loopback, settings.hosts))
    if settings.api_keys or not is_local or server is None or server[1] is None:
        # no page comes over a unix socket; uvicorn before 0.35 gives no address for one
        return None
    host = Headers(scope=scope).get("host", "")
    name = re.sub(r":\d+$", "", host).strip("[]")
    known = {origin.split("://", 1)[-1] for origin in settings.cors_origins}
    if not host or is_loopback(name) or address_of(name) or {"*", host, name} & known:
        return None
    return Refused(
        403,
        f"this server is for its own machine, which is not called {name[:80]}: "
        "give --api-key to serve it under a name, or"
        " allow the name with --cors-origin",
    )


def key_of(headers: Headers) -> bytes:
    """The API key of a request as bytes; empty if it has none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.encode("latin-1", "replace")
