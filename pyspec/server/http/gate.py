"""The door: api keys, and pages of other sites. Pure ASGI, so streams pass untouched."""

from __future__ import annotations

import hmac
import re

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from pyspec.server.http.envelope import Refused, on_error
from pyspec.server.settings import ServerSettings, is_loopback

PUBLIC = frozenset({"/", "/health", "/v1/health", "/models", "/v1/models"})
LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def given_key(headers: Headers) -> str:
    """The key that a client sent, right or not."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


class Gate:
    """Refuses a request without the right key, and one that a page from elsewhere sent.

    A browser lets any page post to this machine; it only hides the answer. Generation costs the same, so a foreign
    Origin is refused before the work, not after.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._keys = [key.encode() for key in settings.api_keys]
        self._origins = frozenset(settings.cors_origins)
        self._is_local = all(map(is_loopback, settings.hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            response = await on_error(Request(scope), refusal)
            await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refused | None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin and scope["method"] not in ("GET", "HEAD", "OPTIONS") and not self._is_known(origin, headers):
            return Refused(403, f"pages of {origin[:80]} may not use this server; allow them with --cors-origin")
        if self._keys and scope["path"] not in PUBLIC and not self._has_key(headers):
            return Refused(401, "invalid api key; send it as Authorization: Bearer KEY")
        return None

    def _is_known(self, origin: str, headers: Headers) -> bool:
        if "*" in self._origins or origin in self._origins or re.fullmatch(LOCAL_ORIGIN, origin):
            return True
        # Our own page under a name of ours. Not when only this machine is served: then a foreign name that was made
        # to resolve to it (DNS rebinding) would pass for one.
        return not self._is_local and origin.split("://", 1)[-1] == headers.get("host")

    def _has_key(self, headers: Headers) -> bool:
        """Compare with every key, each in constant time, so that the time tells nothing."""
        given = given_key(headers).encode()
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return any(matches)
