"""Listening: uvicorn with h11, header limits, and a shutdown that lets running requests finish.

First signal: no new work, running requests get `limits.drain_s`, then an error event; exit is clean. Second: at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from pyspec.errors import ConfigError, Unavailable
from pyspec.server.app import create_app
from pyspec.server.engine import EngineLike
from pyspec.server.service import Service
from pyspec.server.settings import ServerSettings

SWITCH_S = 1e-4
"""How long a thread that wants the GIL waits before it asks for it. Python's 5 ms would be lost each time the engine lets go
of it, which is at every launch, while another thread is at work on a long text."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FLUSH_S = 3.0  # after the drain: time to write the last events


class Server(uvicorn.Server):
    """uvicorn's server with our shutdown: drain, then abort, then go; it does not raise the signal again."""

    def __init__(self, config: uvicorn.Config, service: Service, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.service = service
        self._on_ready = on_ready
        self._switch_s = sys.getswitchinterval()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            sys.setswitchinterval(min(SWITCH_S, self._switch_s))
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.is_draining = True
        error = Unavailable("the server is shutting down")
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.service.settings.limits.drain_s, self.service.abort_all, error)
        await super().shutdown(sockets)
        timer.cancel()
        sys.setswitchinterval(self._switch_s)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # whoever runs us in a thread sets should_exit
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in SIGNALS}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def make_server(app: Starlette, settings: ServerSettings, on_ready: Callable[[], None] = lambda: None) -> Server:
    """A configured server that has not been started; `server.run(sockets=[...])` serves until should_exit."""
    service: Service = app.state.service
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=settings.limits.header,
        timeout_graceful_shutdown=int(settings.limits.drain_s + FLUSH_S),
        timeout_keep_alive=75,
    )
    return Server(config, service, on_ready)


def bind(settings: ServerSettings) -> socket.socket:
    """The listening socket. Raises ConfigError if the address is taken or unknown."""
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((settings.host, settings.port), family=family, backlog=512)
    except OSError as error:
        why = f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}"
        raise ConfigError(f"{why}; choose another with --port") from error


def run(engine: EngineLike, settings: ServerSettings, on_ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until a signal. `on_ready` is called with the URL once requests are taken.

    Raises ConfigError before anything listens: settings that must not be served, an address in use.
    """
    settings.check()
    app = create_app(engine, settings)
    with bind(settings) as sock:
        port = sock.getsockname()[1]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        server = make_server(app, settings, lambda: on_ready(f"http://{host}:{port}"))
        server.run(sockets=[sock])
