"""One client must not hurt another: unexpected connections, headers, bodies, names and ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace

import httpx
import pytest
from pydantic import ValidationError
from server_client import refusal
from server_fakes import FakeEngine, Script
from server_live import Live
from starlette.testclient import TestClient
from waiting import wait_for

from pyspec.errors import QueueFull, Unavailable
from pyspec.repeats import RateLimit
from pyspec.server.api.anthropic import MessagesBody
from pyspec.server.api.schema import Body, ChatBody, DetokenizeBody
from pyspec.server.app import create_app
from pyspec.server.http.body import Reading
from pyspec.server.http.connections import BURSTS, LEAST, burst, most_connections
from pyspec.server.http.envelope import Refused
from pyspec.server.http.listen import BACKLOG
from pyspec.server.service import FairThreads
from pyspec.server.settings import Limits, ServerSettings
from pyspec.text.sandbox_process import STALLED
from pyspec.text.template import ChatTemplate

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
Serve = Callable[..., Live]


def connect(live: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), timeout=5)


def post(body: bytes, *, path: str = "/v1/chat/completions", host: str = "localhost") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def received(sock: socket.socket) -> bytes:
    """Everything until the server closes."""
    out = b""
    try:
        while data := sock.recv(65536):
            out += data
    except ConnectionError:
        pass
    return out


def test_headers_that_do_not_end_cost_their_connection(serve: Serve) -> None:
    live = serve(Limits(header_read_s=0.2))
    for begin in (b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "):
        with connect(live) as sock:
            sock.sendall(begin)
            assert received(sock) == b""


def test_a_slow_drip_of_headers_does_not_move_the_limit(serve: Serve) -> None:
    live = serve(Limits(header_read_s=0.3))
    with connect(live) as sock:
        began = time.monotonic()
        with pytest.raises(OSError):
            for _ in range(200):
                sock.sendall(b"G")
                time.sleep(0.02)
                if not sock.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK):
                    raise ConnectionResetError
        assert time.monotonic() - began > 0.2


def test_idle_connections_make_room_for_new_ones(serve: Serve) -> None:
    live = serve(Limits(connections=8, header_read_s=30))
    idle = [connect(live) for _ in range(30)]
    assert httpx.get(f"{live.url}/health").status_code == 200
    for sock in idle:
        sock.close()


def test_who_opens_many_connections_loses_his_own(serve: Serve) -> None:
    live = serve(Limits(connections=8, header_read_s=30))
    address = ("127.0.0.1", live.port)
    try:
        patient = socket.create_connection(address, timeout=10, source_address=("127.0.0.2", 0))
    except OSError:
        pytest.skip("127.0.0.2 is no address here")
    with patient:
        hungry = [connect(live) for _ in range(30)]
        assert httpx.get(f"{live.url}/health").status_code == 200  # behind all of them
        patient.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert received(patient).startswith(b"HTTP/1.1 200")
    for sock in hungry:
        sock.close()


@pytest.mark.slow
def test_busy_connections_are_not_closed_for_new_ones(serve: Serve, engine: FakeEngine) -> None:
    engine.script = Script(text="x" * 40, width=1, round_s=0.02)
    live = serve(Limits(connections=8, header_read_s=30))
    busy = [connect(live) for _ in range(4)]
    for sock in busy:
        sock.sendall(post(json.dumps(CHAT).encode()))
    wait_for(lambda: len(engine.seen) == 4)
    for _ in range(20):
        connect(live)
    for sock in busy:
        sock.settimeout(10)
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        sock.close()


def test_headers_have_a_size(live_url: str) -> None:
    assert "at most" in refusal(httpx.get(f"{live_url}/health", headers={"X-Much": "x" * 40_000}), 431)


@pytest.fixture
def live_url(serve: Serve) -> str:
    return serve().url


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "localhost.evil.example"])
def test_a_foreign_name_that_leads_to_this_machine_is_refused(live_url: str, host: str) -> None:
    for path in ("/props", "/slots", "/v1/models", "/"):
        assert "--api-key" in refusal(httpx.get(live_url + path, headers={"Host": host}), 403)


@pytest.mark.parametrize(
    "host", ["localhost:8080", "127.0.0.1", "[::1]:9", "192.168.1.7:8080", "127.0.0.9"]
)
def test_names_and_addresses_of_this_machine_are_served(live_url: str, host: str) -> None:
    assert httpx.get(f"{live_url}/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_key_that_is_not_ascii_is_known_as_it_travels(engine: FakeEngine, encoding: str) -> None:
    client = TestClient(create_app(engine, ServerSettings(api_keys=("schlüssel",))))
    good = {b"Authorization": "Bearer schlüssel".encode(encoding)}
    bad = {b"Authorization": "Bearer schlussel".encode(encoding)}
    assert client.get("/props", headers=good).status_code == 200  # type: ignore[arg-type]
    assert client.get("/props", headers=bad).status_code == 401  # type: ignore[arg-type]


def test_a_client_that_has_closed_its_half_gets_its_answer(serve: Serve, engine: FakeEngine) -> None:
    engine.script = Script(text="answer", width=1, round_s=0.05)
    live = serve()
    for stream in (False, True):
        with connect(live) as sock:
            sock.settimeout(10)
            sock.sendall(post(json.dumps(CHAT | {"stream": stream}).encode()))
            sock.shutdown(socket.SHUT_WR)
            answer = received(sock)
        assert b"200 OK" in answer and (b"[DONE]" if stream else b'"answer"') in answer
    assert not engine.cancelled


def test_a_client_that_is_gone_is_still_noticed(serve: Serve, engine: FakeEngine) -> None:
    engine.script = Script(text="x" * 1000, width=1, round_s=0.05)
    live = serve()
    for stream in (False, True):
        sock = connect(live)
        sock.sendall(post(json.dumps(CHAT | {"stream": stream}).encode()))
        wait_for(lambda: engine.n_busy == 1)
        sock.close()
        wait_for(lambda: engine.n_busy == 0, 5.0)


def test_a_body_that_is_too_large_is_told_so_while_it_is_sent(serve: Serve) -> None:
    live = serve(Limits(body=10_000))
    with connect(live) as sock:
        sock.settimeout(10)
        sock.sendall(post(b" " * 150_000))
        assert sock.recv(65536).startswith(b"HTTP/1.1 413")


def test_slow_bodies_hold_nobody_up(serve: Serve) -> None:
    live = serve()
    slow = [connect(live) for _ in range(64)]
    for sock in slow:
        sock.sendall(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
    assert httpx.post(f"{live.url}/v1/chat/completions", json=CHAT).status_code == 200
    for sock in slow:
        sock.close()


def test_bodies_on_their_way_have_a_bound_together(serve: Serve) -> None:
    live = serve(Limits(reading=8000))
    first = connect(live)
    first.sendall(
        b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6000\r\n\r\n" + b" " * 5900
    )
    wait_for(lambda: live.server.service.reading.n_byte > 4000)
    assert httpx.post(f"{live.url}/completion", content=b" " * 500).status_code == 429
    first.close()
    wait_for(lambda: live.server.service.reading.n_byte == 0)
    assert httpx.post(f"{live.url}/v1/chat/completions", json=CHAT).status_code == 200


def test_the_last_quarter_of_the_room_for_bodies_is_not_one_client_s() -> None:
    reading = Reading(1000)
    reading.grow(750, "hungry")
    with pytest.raises(Refused):
        reading.grow(1, "hungry")
    reading.grow(250, "other")
    with pytest.raises(Refused):
        reading.grow(1, "third")
    reading.shrink(750, "hungry")
    reading.grow(700, "hungry")


def test_a_client_with_much_text_waits_for_its_own() -> None:
    """Two threads, one client with twenty long pieces of work: a second client goes first when a thread is free."""

    async def go() -> list[str]:
        turns, order = FairThreads(2), []

        async def ask(client: str) -> None:
            await turns.take(client)
            order.append(client)
            await asyncio.sleep(0.001)
            turns.give(client, 2.0 if client == "hungry" else 0.01)

        hungry = [asyncio.create_task(ask("hungry")) for _ in range(20)]
        await asyncio.sleep(0)
        others = [asyncio.create_task(ask("patient")) for _ in range(3)]
        leaving = asyncio.create_task(ask("gone"))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(*hungry, *others)
        assert turns._n_free == 2 and not turns._had_s and not turns._waiting
        return order

    order = asyncio.run(go())
    assert order[:2] == ["hungry"] * 2
    assert order[2:5].count("patient") >= 2
    assert "gone" not in order
    assert len(order) == 23


def test_clients_that_come_once_do_not_keep_others_from_their_threads() -> None:
    async def go() -> int:
        turns = FairThreads(1)
        await turns.take("old")
        late = asyncio.create_task(turns.take("old"))
        waiting = [asyncio.create_task(turns.take(f"first {i}")) for i in range(5)]
        await asyncio.sleep(0)
        turns.give("old", 3.0)
        for i in range(500):
            waiting.append(asyncio.create_task(turns.take(f"once {i}")))
            await asyncio.sleep(0)
            if late.done():
                return i
            done = next(n for n, task in enumerate(waiting) if task.done())
            waiting.pop(done)
            turns.give(next(c for c in turns._here if c not in turns._waiting and c != "old"), 0.5)
        return 500

    assert asyncio.run(go()) < 100


def test_one_client_s_requests_never_take_all_places(engine: FakeEngine) -> None:
    service = create_app(engine, ServerSettings()).state.service
    with ExitStack() as held:
        with pytest.raises(QueueFull):
            for _ in range(1000):
                held.enter_context(service.admitted("hungry"))
        assert service.n_inside >= 8
        held.enter_context(service.admitted("patient"))
    assert service.n_inside == 0 and not service._inside


@pytest.mark.parametrize("n_queue", [0, 16, 500])
def test_one_client_alone_may_fill_every_place_to_wait(engine: FakeEngine, n_queue: int) -> None:
    """`--queue 500` means that 500 requests may wait, also those whose answers come in one piece."""
    service = create_app(engine, ServerSettings()).state.service
    engine.info = replace(engine.info, n_slot=3, n_queue=n_queue)
    with ExitStack() as held:
        for _ in range(3 + 2 * n_queue):
            held.enter_context(service.admitted("hungry"))
        with pytest.raises(QueueFull):
            for _ in range(100):
                held.enter_context(service.admitted("hungry"))
        held.enter_context(service.admitted("patient"))
    assert service.n_inside == 0


@pytest.mark.parametrize("n_hostile", [1, 2, 4, 8])
def test_however_many_clients_take_all_they_get_one_more_is_let_in(
    engine: FakeEngine, n_hostile: int
) -> None:
    service = create_app(engine, ServerSettings()).state.service
    with ExitStack() as held:
        for i in range(1000):
            with suppress(QueueFull):
                held.enter_context(service.admitted(f"hungry {i % n_hostile}"))
        held.enter_context(service.admitted("patient"))
    assert service.n_inside == 0 and not service._inside


def test_with_few_file_descriptors_a_part_of_them_is_left_for_bursts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (64, 64))
    n_open = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 32
    most, at_once = most_connections(Limits()), burst(Limits())
    assert most >= LEAST and at_once == LEAST and (n_open > 16 or n_open + most + BURSTS * at_once <= 64)
    monkeypatch.setattr("resource.getrlimit", lambda which: (1 << 20, 1 << 20))
    assert (most_connections(Limits()), burst(Limits())) == (1024, BACKLOG)


def test_a_large_body_does_not_keep_small_ones_waiting(engine: FakeEngine) -> None:
    """The threads for text may all be at work on large bodies."""
    inside, leave = threading.Event(), threading.Event()

    class Stuck(type(engine.tokenizer)):  # type: ignore[misc]
        def encode(self, text: str, **options: bool) -> list[int]:
            if len(text) > 100_000:
                inside.set()
                assert leave.wait(20)
            return super().encode(text, **options)

    engine.tokenizer = Stuck()
    client = TestClient(create_app(engine, ServerSettings()))
    with client:
        threads = [
            threading.Thread(
                target=client.post, args=("/tokenize",), kwargs={"json": {"content": "x" * 200_000}}
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        assert inside.wait(10)
        assert client.post("/tokenize", json={"content": "hello"}).json()["tokens"]
        leave.set()
        for thread in threads:
            thread.join()


def test_a_tree_of_very_many_arrays_is_refused_before_it_is_looked_at(engine: FakeEngine) -> None:
    client = TestClient(create_app(engine, ServerSettings()))
    assert "200000" in refusal(
        client.post("/completion", content=b'{"prompt": [' + b"[]," * 300_000 + b"[]]}")
    )


@pytest.mark.slow
def test_while_the_server_drains_its_port_says_so(serve: Serve, engine: FakeEngine) -> None:
    engine.script = Script(text="x" * 20, width=1, round_s=0.05)
    live = serve(Limits(drain_s=20))
    with connect(live) as sock:
        sock.settimeout(10)
        sock.sendall(post(json.dumps(CHAT).encode()))
        wait_for(lambda: engine.n_busy == 1)
        live.server.should_exit = True
        wait_for(lambda: live.server.service.is_draining)
        assert "shutting down" in refusal(httpx.post(f"{live.url}/v1/chat/completions", json=CHAT), 503)
        assert httpx.get(f"{live.url}/ready").status_code == 503
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_file_name_that_is_no_text_is_shown_as_far_as_it_is(engine: FakeEngine) -> None:
    engine.info = replace(engine.info, model_path="mod\udce9l.gguf", model_name="mod\udce9l")
    client = TestClient(create_app(engine, ServerSettings()))
    for path in ("/props", "/v1/models"):
        assert client.get(path).status_code == 200


def test_the_drafter_s_folder_is_nobody_s_business(engine: FakeEngine) -> None:
    engine.info = replace(engine.info, draft_path="secret/place/draft.gguf")
    client = TestClient(create_app(engine, ServerSettings(api_keys=("k",))))
    assert "secret" not in client.get("/v1/models").text


def test_pings_have_a_least_distance(serve: Serve, engine: FakeEngine) -> None:
    engine.script = Script(text="x", prefill_s=0.4)
    live = serve()
    response = httpx.post(
        f"{live.url}/v1/chat/completions", json=CHAT | {"stream": True, "sse_ping_interval": 1e-9}
    )
    assert response.content.count(b": ping") < 20


def test_requests_say_who_asks(engine: FakeEngine) -> None:
    client = TestClient(create_app(engine, ServerSettings(api_keys=("k1", "k2"))))
    for key in ("k1", "k2", "k1"):
        client.post(
            "/completion", json={"prompt": ["a", "b"]}, headers={"Authorization": f"Bearer {key}"}
        )
    a, b, c = (engine.seen[i] for i in (0, 2, 4))
    assert a.client == c.client != b.client and "k1" not in a.client
    assert engine.seen[0].group == engine.seen[1].group != engine.seen[4].group


@pytest.mark.parametrize("field", [{"repeat_penalty": 1e-300}, {"repeat_penalty": 0}])
def test_a_penalty_that_has_no_inverse_is_a_bad_request(engine: FakeEngine, field: dict) -> None:
    client = TestClient(create_app(engine, ServerSettings()))
    assert client.post("/v1/chat/completions", json=CHAT | field).status_code == 400


# -- logs, and the sandbox -----------------------------------------------------------------------------------------


def test_a_line_that_a_client_can_cause_is_logged_so_often_and_then_counted() -> None:
    now = [0.0]
    limit = RateLimit(most=3, window_s=10, clock=lambda: now[0])

    def record(n: int) -> logging.LogRecord:
        return logging.LogRecord("pyspec.x", logging.WARNING, "", 0, "client %d did it", (n,), None)

    assert [limit.filter(record(i)) for i in range(100)].count(True) == 3
    now[0] = 11.0
    late = record(100)
    assert limit.filter(late) and late.getMessage() == "client 100 did it (and 97 more like it)"
    assert limit.filter(
        logging.LogRecord("pyspec.x", logging.WARNING, "", 0, "something else", (), None)
    )


@pytest.mark.slow
def test_a_sandbox_that_was_stopped_costs_nobody_a_request() -> None:
    template = ChatTemplate("{{ messages[0]['content'] }}")
    try:
        assert template.render([{"role": "user", "content": "one"}]) == "one"
        process = template._renderer.process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        assert template.render([{"role": "user", "content": "two"}]) == "two"
        assert template._renderer.process.pid != process.pid
    finally:
        os.kill(template._renderer.process.pid, signal.SIGKILL)


def test_a_sandbox_that_gets_no_time_is_nobodys_fault() -> None:
    template = ChatTemplate("{{ messages[0]['content'] }}")
    box, asked = template._renderer._box, [{"role": "user", "content": "one"}]
    template.render(asked)
    assert box.process is not None
    os.kill(box.process.pid, signal.SIGSTOP)
    answer = box._exchange(b"{}\n", 0.2)
    assert STALLED in answer and "failed" in answer
    box.ask = lambda line, seconds: answer  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="try again"):
        template.render(asked)


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (DetokenizeBody, {"tokens": ["x"] * 1000}),
        (ChatBody, {"messages": [1] * 1000}),
        (MessagesBody, {"messages": [1] * 1000, "max_tokens": 1}),
    ],
)
def test_of_a_list_that_is_wrong_only_the_first_item_is_looked_at(body: type[Body], value: dict) -> None:
    """All of a million flaws take seconds to write down."""
    with pytest.raises(ValidationError) as e:
        body.model_validate(value)
    assert e.value.error_count() == 1
