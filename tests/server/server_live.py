"""A server on a real port, in a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from server_fakes import FakeEngine
from starlette.applications import Starlette
from waiting import wait_for

from pyspec.server.app import create_app
from pyspec.server.http.serve import Server, bind, make_server
from pyspec.server.settings import Limits, ServerSettings

if TYPE_CHECKING:
    from pyspec.engine.api import Engine


@dataclass
class Live:
    """A server on a real port, in a thread."""

    engine: FakeEngine
    server: Server
    thread: threading.Thread
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def running(
    app: Starlette, settings: ServerSettings, sockets: Sequence[socket.socket]
) -> Iterator[tuple[Server, threading.Thread]]:
    """A server of these sockets, in a thread that is over in the end."""
    server = make_server(app, settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": list(sockets)}, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield server, thread
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """The address of a server for a loaded engine, in a thread."""
    settings = ServerSettings(port=0, limits=Limits(drain_s=0.2))
    with bind(settings) as sock, running(create_app(engine, settings), settings, [sock]):
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
