"""The server before its model is loaded, and while its engine is replaced: the answers to clients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest
from server_fakes import FakeEngine
from waiting import wait_for

from pyspec.errors import ModelError
from pyspec.request import Request
from pyspec.server.engine import EngineLike
from pyspec.server.http import serve
from pyspec.server.http.serve import Served, Server
from pyspec.server.service import LONG_PROMPT
from pyspec.server.settings import Limits, ServerSettings


@dataclass
class Start:
    """A server that is started in a thread, and loads when it is let."""

    go: threading.Event = field(default_factory=threading.Event)
    engine: FakeEngine | None = None
    error: BaseException | None = None
    url: str = ""
    ended: list[object] = field(default_factory=list)
    server: list[Server] = field(default_factory=list)
    is_ready: threading.Event = field(default_factory=threading.Event)

    def load(self) -> EngineLike:
        self.go.wait(20)
        if self.error is not None:
            raise self.error
        self.engine = FakeEngine(n_ctx=100_000)
        return self.engine

    def run(self) -> None:
        settings = ServerSettings(port=0, limits=Limits(drain_s=0.2, body=64 << 20))
        try:
            self.ended.append(serve.run(self.load, settings, lambda engine, urls: self.is_ready.set()))
        except BaseException as e:  # noqa: BLE001 - the test looks at it
            self.ended.append(e)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    started, make, listen = Start(), serve.make_server, serve.listen

    def watch_server(*args: object) -> Server:
        started.server.append(make(*args))  # type: ignore[arg-type]
        return started.server[0]

    def watch_socket(settings: ServerSettings) -> object:
        sockets = listen(settings)
        started.url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        return sockets

    monkeypatch.setattr(serve, "make_server", watch_server)
    monkeypatch.setattr(serve, "listen", watch_socket)
    thread = threading.Thread(target=started.run, daemon=True)
    thread.start()
    wait_for(lambda: bool(started.server) and started.server[0].started, 20)
    yield started
    started.go.set()
    started.server[0].should_exit = True
    thread.join(20)
    assert not thread.is_alive()
    if started.engine is not None:
        started.engine.close()


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/ready", "/props", "/v1/models", "/metrics"])
def test_every_path_says_that_the_model_is_loading_in_llama_servers_words(
    start: Start, path: str
) -> None:
    answer = httpx.get(start.url + path)
    assert answer.status_code == 503
    assert answer.json() == {
        "error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}
    }


def test_requests_are_refused_while_loading_and_answered_after_it(start: Start) -> None:
    assert httpx.post(f"{start.url}/completion", json={"prompt": "x"}).status_code == 503
    start.go.set()
    assert start.is_ready.wait(20)
    assert httpx.get(f"{start.url}/health").json() == {"status": "ok"}
    assert (
        httpx.post(f"{start.url}/completion", json={"prompt": "x"}).json()["content"] == "Hello, world"
    )
    start.server[0].should_exit = True
    wait_for(lambda: bool(start.ended), 20)
    assert start.ended == [Served(start.engine, False)]


def test_a_model_that_can_not_be_loaded_ends_the_server_with_the_reason(start: Start) -> None:
    start.error = ModelError("there is no such file")
    start.go.set()
    wait_for(lambda: bool(start.ended), 20)
    assert start.ended == [start.error]


def test_a_server_that_is_told_to_go_while_it_loads_goes(start: Start) -> None:
    start.server[0].should_exit = True
    wait_for(lambda: bool(start.ended), 20)
    assert start.ended == [Served(None, False)]


def test_health_goes_on_while_the_engine_recovers_and_ready_does_not(start: Start) -> None:
    start.go.set()
    assert start.is_ready.wait(20) and start.engine is not None
    start.engine.state = lambda: "recovering"  # type: ignore[method-assign]
    health, ready = httpx.get(f"{start.url}/health"), httpx.get(f"{start.url}/ready")
    assert (health.status_code, health.json()) == (200, {"status": "recovering"})
    assert ready.status_code == 503 and ready.json()["status"] == "recovering"
    assert httpx.post(f"{start.url}/completion", json={"prompt": "x"}).status_code == 200, (
        "requests are taken"
    )
    start.engine.is_alive = False
    assert httpx.get(f"{start.url}/health").status_code == 503


def test_a_long_prompt_is_checked_beside_the_event_loop(start: Start) -> None:
    start.go.set()
    assert start.is_ready.wait(20) and start.engine is not None
    threads: list[str] = []
    submit = start.engine.submit

    def watch(request: Request, sink: object) -> str:
        threads.append(threading.current_thread().name)
        return submit(request, sink)  # type: ignore[arg-type]

    start.engine.submit = watch  # type: ignore[method-assign]
    for n in (3, LONG_PROMPT):
        answer = httpx.post(
            f"{start.url}/completion", json={"prompt": [65] * n, "n_predict": 3}, timeout=30
        )
        assert answer.json()["tokens_evaluated"] == n
    assert threads[0] != threads[1] and threads[1].startswith("pyspec-text")


@pytest.mark.slow
def test_a_client_that_leaves_while_its_long_prompt_is_checked_leaves_nothing(start: Start) -> None:
    start.go.set()
    assert start.is_ready.wait(20) and start.engine is not None
    arrived, go_on, submit = threading.Event(), threading.Event(), start.engine.submit

    def slow(request: Request, sink: object) -> str:
        arrived.set()
        go_on.wait(20)
        return submit(request, sink)  # type: ignore[arg-type]

    start.engine.submit = slow  # type: ignore[method-assign]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{start.url}/completion",
            json={"prompt": [65] * LONG_PROMPT},
            timeout=httpx.Timeout(30, read=1.0),
        )
    assert arrived.wait(20)
    service = start.server[0].service
    wait_for(lambda: service.n_inside == 0, 20)
    go_on.set()
    wait_for(lambda: bool(start.engine.cancelled), 20)  # type: ignore[union-attr]
    wait_for(lambda: start.engine.n_busy == service.n_jobs == 0, 20)  # type: ignore[union-attr]
