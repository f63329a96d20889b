"""Listening: uvicorn with h11, header limits, and a shutdown that lets running requests finish.

The port opens before the model is loaded; clients then get "Loading model". First signal (interrupt, termination, or hang-up of the terminal):
no new work, running requests get `limits.drain_s`, then an error event; the exit is clean. Second signal: exit at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from pyspec.errors import Unavailable
from pyspec.progress import listening
from pyspec.server.app import create_app
from pyspec.server.engine import EngineLike
from pyspec.server.http.connections import burst, protocol
from pyspec.server.http.door import Door, LoadLog
from pyspec.server.http.listen import BACKLOG, bind, listen, unlink, url_of
from pyspec.server.models.router import Router
from pyspec.server.service import Service
from pyspec.server.settings import ServerSettings

log = logging.getLogger(__name__)

__all__ = ["Served", "Server", "bind", "make_server", "run"]
SWITCH_S = 1e-4
"""Seconds that a thread waits before it requests the GIL. The engine releases it at every launch; with Python's default of 5 ms it
would lose that time whenever another thread works on a long text."""

BELOW_US = logging.getLogger("uvicorn.error")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DRAIN_LOOK_S = 0.02
FLUSH_S = 3.0  # after the drain, to write the last events


class Server(uvicorn.Server):
    """uvicorn's server with a different shutdown: drain, abort, exit. It does not raise the signal again."""

    def __init__(self, config: uvicorn.Config, door: Door, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.door = door
        self._on_ready = on_ready
        self._switch_s = sys.getswitchinterval()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def service(self) -> Service | Router:
        service = self.door.service
        assert service is not None, "nothing is served while the model is loaded"
        return service

    def begin(self) -> None:
        """Let several models begin, some of which may load at once. Called on any thread."""
        service = self.service
        if isinstance(service, Router) and self._loop is not None:
            self._loop.call_soon_threadsafe(service.begin)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets)
        finally:
            BELOW_US.disabled = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            for sock in sockets or ():
                # length of the system's queue; uvicorn has one number for that and for a burst
                sock.listen(BACKLOG)
            sys.setswitchinterval(min(SWITCH_S, self._switch_s))
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.door.service is None:
            await super().shutdown(sockets)
        else:
            await self._drain()
            await super().shutdown(sockets)
        sys.setswitchinterval(self._switch_s)

    async def _drain(self) -> None:
        """Wait for running requests, and end those that take too long. New work gets 503 meanwhile."""
        self.service.is_draining = True
        loop = asyncio.get_running_loop()
        end = loop.time() + self.service.settings.limits.drain_s
        while self.service.n_jobs and loop.time() < end and not self.force_exit:
            await asyncio.sleep(DRAIN_LOOK_S)
        self.service.abort_all(Unavailable("the server is shutting down"))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Exit at once on a second signal, but not on a second hang-up: both the shell and the system send one when a terminal closes.

        Nothing is logged here: the signal may interrupt a write to the same stream, which is not reentrant.
        """
        is_second = self.should_exit
        self.should_exit = True
        if is_second and sig == signal.SIGHUP:
            return
        if is_second and not self.force_exit:
            self.force_exit = True
            BELOW_US.disabled = True  # it would log a traceback for each request
            self._soon(self._log_forced)
        elif not is_second:
            self._soon(self._log_draining)

    def _soon(self, say: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(say)

    def _log_forced(self) -> None:
        log.warning("ending at once%s", self._running("; requests that are cut off: %d"))

    def _log_draining(self) -> None:
        if self.door.service is not None:
            drain_s = self.door.service.settings.limits.drain_s
            until = f"they get {drain_s:g} s, or until a second signal"
            more = self._running(f"; running requests: %d; {until}")
            log.info("ending%s", more)

    def _running(self, text: str) -> str:
        service = self.door.service
        return text % service.n_jobs if service is not None and service.n_jobs else ""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # a caller that runs this in a thread sets should_exit
            return
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # nohup
        handled = [sig for sig in SIGNALS if sig != signal.SIGHUP or not is_ignored]
        before = {sig: signal.signal(sig, self.handle_exit) for sig in handled}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def make_server(
    app: Starlette | None,
    settings: ServerSettings,
    on_ready: Callable[[], None] = lambda: None,
) -> Server:
    """A configured server, not yet started; `server.run(sockets=[...])` serves until should_exit.

    app  None: set later, through the server's `door`
    """
    door = Door(settings, app)
    config = uvicorn.Config(
        door,
        http=protocol(settings.limits),  # type: ignore[arg-type]  # a class, as uvicorn's own
        backlog=burst(settings.limits),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=settings.limits.header,
        timeout_graceful_shutdown=int(settings.limits.drain_s + FLUSH_S),
        timeout_keep_alive=75,
        ssl_keyfile=settings.ssl_key_file or None,
        ssl_certfile=settings.ssl_cert_file or None,
    )
    return Server(config, door, on_ready)


@dataclass(frozen=True)
class Served:
    """How serving ended: the engine, or all of several models, if it was loaded, and True if the exit was forced."""

    engine: EngineLike | Router | None
    is_hurried: bool


def run(
    load: Callable[[], EngineLike | Router],
    settings: ServerSettings,
    on_ready: Callable[[Any, list[str]], None],
    sockets: Sequence[socket.socket] | None = None,
) -> Served:
    """Listen, load, and serve until a signal. `on_ready` gets what was loaded, and the URLs, once requests are accepted.

    sockets  already bound sockets, or None to bind those of the settings; closed at the end

    Raises ConfigError before anything listens or is loaded (settings that must not be served, an address in use), and
    errors of `load`.
    """
    settings.check()
    with ExitStack() as held:
        ready = listen(settings) if sockets is None else sockets
        bound = [held.enter_context(sock) for sock in ready]
        held.callback(unlink, settings)
        urls = [url_of(sock, settings) for sock in bound]
        fields = {"event": "listening", "urls": urls}
        log.info("listening on %s", ", ".join(urls), extra={"fields": fields})
        server = make_server(None, settings)
        loaded: list[EngineLike | Router] = []
        failed: list[BaseException] = []

        def open_door() -> None:
            try:
                with listening(LoadLog(server.door)):
                    loaded.append(load())
                server.door.app = create_app(loaded[0], settings)
                server.begin()
                on_ready(loaded[0], urls)
            except BaseException as e:  # noqa: BLE001 - re-raised in the waiting thread
                failed.append(e)
                server.should_exit = True

        threading.Thread(target=open_door, name="pyspec-load", daemon=True).start()
        server.run(sockets=bound)
        if failed:
            raise failed[0]
        return Served(loaded[0] if loaded else None, server.force_exit)
