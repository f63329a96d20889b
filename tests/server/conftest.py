from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from server_fakes import FakeEngine

from pyspec.server.app import create_app
from pyspec.server.serve import Server, bind, make_server
from pyspec.server.settings import Limits, ServerSettings


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


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.close()


@pytest.fixture
def serve(engine: FakeEngine) -> Iterator[Callable[..., Live]]:
    """Start a server for `engine`; called with the settings' limits. All are stopped at the end."""
    started: list[Live] = []

    def start(limits: Limits | None = None) -> Live:
        settings = ServerSettings(port=0, limits=limits or Limits(drain_s=0.2))
        sock = bind(settings)
        server = make_server(create_app(engine, settings), settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        started.append(Live(engine, server, thread, sock.getsockname()[1]))
        wait_for(lambda: server.started)
        return started[-1]

    yield start
    for live in started:
        live.server.should_exit = True
        live.thread.join(timeout=10)
        assert not live.thread.is_alive()


def wait_for(claim: Callable[[], bool], timeout_s: float = 2.0) -> float:
    """Wait until `claim` holds; the seconds it took. Fails after `timeout_s`."""
    start = time.monotonic()
    while not claim():
        assert time.monotonic() - start < timeout_s, "it did not happen in time"
        time.sleep(0.005)
    return time.monotonic() - start
