from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from server_client import App
from server_fakes import FakeEngine
from server_live import Live
from waiting import wait_for

from pyspec.server.app import create_app
from pyspec.server.http.serve import bind, make_server
from pyspec.server.settings import Limits, ServerSettings


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.close()


@pytest.fixture
def app(engine: FakeEngine) -> App:
    return App(create_app(engine, ServerSettings()))


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
