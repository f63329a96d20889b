"""What stands at the door while the model is loaded: it says so on every path, and then lets everything through."""

from __future__ import annotations

import logging
import sys
import time
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.responses import RedirectResponse
from starlette.types import Receive, Scope, Send

from pyspec.errors import NotFound, Unavailable
from pyspec.progress import DOWNLOAD
from pyspec.server.http.access import AccessLog
from pyspec.server.http.envelope import JSON, error_body, error_response
from pyspec.server.http.gate import foreign_host
from pyspec.server.http.strict import ABSOLUTE
from pyspec.server.page.loading import loading_page
from pyspec.server.service import Service
from pyspec.server.settings import ServerSettings

log = logging.getLogger(__name__)

FIRST_S = 2.0  # of a load, before a line is worth it
EVERY_S = 5.0  # between such lines
DOWNLOAD_S = 30.0  # between those of a download, but for one at each tenth of the file
HEALTH = ("/health", "/v1/health")
LOADING = Unavailable("Loading model")  # llama-server's words: clients wait for them to go away


def in_origin_form(scope: Scope) -> Scope:
    """A request whose target is a whole address, as clients of a proxy send it ("GET http://host/health"): every server has to take it, and the
    host in it goes before the one in the headers (RFC 9112, 3.2.2). What is no address before it is decoded is none."""
    target = scope.get("raw_path") or scope["path"].encode("latin-1", "replace")
    if not (found := ABSOLUTE.fullmatch(target)):
        return scope
    headers = [(b"host", found[1]), *(h for h in scope["headers"] if h[0] != b"host")]
    raw = found[2] or b"/"
    return {**scope, "path": unquote(raw.decode("latin-1")), "raw_path": raw, "headers": headers}


class LoadLog:
    """Hears how far a load is: /health shows it, and a line of the log tells it now and then."""

    def __init__(self, door: Door) -> None:
        self._door, self._due = door, time.monotonic() + FIRST_S
        self._tenth = (DOWNLOAD, 0)  # of what was told last

    def __call__(self, stage: str, fraction: float) -> None:
        self._door.loading = {"stage": stage, "fraction": round(fraction, 3)}
        now, is_download = time.monotonic(), stage.startswith(DOWNLOAD)
        tenth = (stage, int(10 * fraction))
        if is_download and sys.stderr.isatty():  # where the library that downloads draws a bar
            return
        if fraction < 1 and (now >= self._due or (is_download and tenth != self._tenth)):
            self._due = now + (DOWNLOAD_S if is_download else EVERY_S)
            self._tenth = tenth
            fields = {"event": "loading"} | self._door.loading
            log.info("loading: %s, %.0f %%", stage, 100 * fraction, extra={"fields": fields})


class Door:
    """An ASGI application for the time in which there is none. `app`: set, from any thread, once there is one.

    The prefix of `settings`, "/llm", is where all paths begin; it is taken off, and what does not begin so is not here.
    """

    def __init__(self, settings: ServerSettings, app: Starlette | None = None) -> None:
        self.app, self.settings = app, settings
        self.loading: dict[str, object] = {}  # "stage" and "fraction" of what is being done
        self._prefix = settings.api_prefix
        self._logged = AccessLog(self._answer)

    @property
    def service(self) -> Service | None:
        return None if self.app is None else self.app.state.service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await self._logged(in_origin_form(scope), receive, send)

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
        """The application comes later than its start-up would, so its end is told here."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self.service is not None:
            self.service.shut_down()
        await send({"type": "lifespan.shutdown.complete"})
