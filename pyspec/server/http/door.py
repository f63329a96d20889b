"""What stands at the door while the model is loaded: it says so on every path, and then lets everything through."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from pyspec.errors import Unavailable
from pyspec.server.http.envelope import error_response
from pyspec.server.service import Service

LOADING = Unavailable("Loading model")  # llama-server's words: clients wait for them to go away


class Door:
    """An ASGI application for the time in which there is none. `app`: set, from any thread, once there is one."""

    def __init__(self, app: Starlette | None = None) -> None:
        self.app = app

    @property
    def service(self) -> Service | None:
        return None if self.app is None else self.app.state.service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self.app is not None:
            await self.app(scope, receive, send)
        else:
            await error_response(scope["path"], LOADING)(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """The application comes later than its start-up would, so its end is told here."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self.service is not None:
            self.service.shut_down()
        await send({"type": "lifespan.shutdown.complete"})
