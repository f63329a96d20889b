"""The server on a real port: the openai client, clients that leave or read slowly, and shutting down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
from server_client import parse_events, refusal
from server_fakes import FakeEngine, Script
from server_live import Live
from waiting import wait_for

from pyspec.server.app import create_app
from pyspec.server.http.connections import GuardedProtocol
from pyspec.server.http.serve import bind, make_server
from pyspec.server.settings import Limits, ServerSettings

Serve = Callable[..., Live]
MESSAGES = [{"role": "user", "content": "hi"}]
LONG = Script(text="x" * 400, round_s=0.02)


def test_the_openai_client_chats(gpt: openai.OpenAI) -> None:
    answer = gpt.chat.completions.create(
        model="any", messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=1, logit_bias={"97": 3}
    )
    assert answer.choices[0].message.content == "Hello" and answer.choices[0].finish_reason == "length"
    assert [entry.token for entry in answer.choices[0].logprobs.content] == list("Hello")
    assert answer.usage.completion_tokens == 5 and answer.timings["predicted_n"] == 5


def test_the_openai_client_streams_with_usage(gpt: openai.OpenAI) -> None:
    stream = gpt.chat.completions.create(
        model="any", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content is None
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello, world"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == 12 and not chunks[-1].choices


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Parts of answers that went straight to a connection."""
    written: list[bytes] = []
    write = GuardedProtocol.write_part

    def note(self: GuardedProtocol, data: bytes) -> None:
        written.append(data)
        write(self, data)

    monkeypatch.setattr(GuardedProtocol, "write_part", note)
    return written


def raw_answer(live: Live, version: str, body: dict[str, object]) -> tuple[bytes, bytes]:
    """The head and all that follows, as bytes."""
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as s:
        s.sendall(head.encode() + text)
        data = b"".join(iter(lambda: s.recv(1 << 16), b""))
    first, _, rest = data.partition(b"\r\n\r\n")
    return first, rest


def unchunked(data: bytes) -> bytes:
    """The content of a chunked body, which is whole."""
    found, at = b"", 0
    while True:
        end = data.index(b"\r\n", at)
        n = int(data[at:end], 16)
        found, at = found + data[end + 2 : end + 2 + n], end + 2 + n + 2
        assert data[at - 2 : at] == b"\r\n"
        if not n:
            assert at == len(data)
            return found


@pytest.mark.parametrize("prompt", [["a"], ["a", "b", "c"]])
def test_tokens_go_straight_to_the_connection_and_the_answer_is_the_same(
    live: Live, parts: list[bytes], prompt: list[str]
) -> None:
    """A client of HTTP/1.0 reads no chunks, so its parts go the usual way."""
    live.engine.script = Script(text="Hello, world", width=1, round_s=0.01)
    body: dict[str, object] = {"prompt": prompt, "stream": True, "seed": 1}
    head, chunked = raw_answer(live, "1.1", body)
    assert b"transfer-encoding: chunked" in head.lower()
    direct = list(parts)
    events = [e for e in parse_events(unchunked(chunked)) if e != "[DONE]"]
    assert direct and all(part in unchunked(chunked) for part in direct)
    head, plain = raw_answer(live, "1.0", body)
    assert b"chunked" not in head.lower() and parts == direct
    for found in (events, [e for e in parse_events(plain) if e != "[DONE]"]):
        for i in range(len(prompt)):
            mine = [c["text"] for e in found for c in e["choices"] if c["index"] == i]
            assert "".join(mine) == "Hello, world"


def test_a_slow_reader_misses_nothing(serve: Serve, engine: FakeEngine, parts: list[bytes]) -> None:
    """Its connection fills up, so parts wait for it, and go straight again later."""
    engine.script = Script(text="y" * 450, round_s=0.001)
    live = serve()
    text = json.dumps({"prompt": "a", "stream": True, "max_tokens": 450, "n_probs": 20}).encode()
    head = "POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.sendall(head.encode() + text)
        data = b""
        while piece := s.recv(3000):
            data += piece
            time.sleep(0.0005)
    events = parse_events(unchunked(data.partition(b"\r\n\r\n")[2]))
    assert "".join(e.get("content", "") for e in events) == "y" * 450 and parts


def test_the_openai_client_completes_lists_of_prompts(gpt: openai.OpenAI) -> None:
    answer = gpt.completions.create(model="any", prompt=["a", "b"], stop=[" w"], seed=1)
    assert [choice.text for choice in answer.choices] == ["Hello,"] * 2
    assert "".join(
        c.choices[0].text for c in gpt.completions.create(model="a", prompt=[97], stream=True)
    ) == ("Hello, world")


def test_the_openai_client_lists_models(gpt: openai.OpenAI) -> None:
    assert [model.id for model in gpt.models.list()] == ["fake-1"]
    assert gpt.models.retrieve("fake-1").object == "model"


def test_errors_become_the_openai_clients_own(gpt: openai.OpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p"):
        gpt.chat.completions.create(model="a", messages=MESSAGES, top_p=7)
    with pytest.raises(openai.NotFoundError):
        gpt.models.retrieve("other")
    engine.n_queue = 0
    with pytest.raises(openai.RateLimitError) as caught:
        gpt.chat.completions.create(model="a", messages=MESSAGES)
    assert caught.value.response.headers["retry-after"] == "1"
    engine.n_queue, engine.script = 8, Script(fail_after=1)
    with pytest.raises(openai.InternalServerError, match="round failed"):
        gpt.chat.completions.create(model="a", messages=MESSAGES)
    stream = gpt.chat.completions.create(model="a", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="round failed"):
        list(stream)


def test_async_clients_stream_side_by_side(live: Live) -> None:
    live.engine.script = Script(round_s=0.005)

    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="a", messages=MESSAGES, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="unused") as client:
            return await asyncio.gather(*(one(client) for _ in range(8)))

    assert asyncio.run(all_of_them()) == ["Hello, world"] * 8


def raw_post(live: Live, body: dict[str, object], path: str = "/v1/chat/completions") -> socket.socket:
    """A connection with a request on it, to be treated badly."""
    data = json.dumps({"messages": MESSAGES, "prompt": "x"} | body).encode()
    sock = socket.create_connection(("127.0.0.1", live.port), timeout=5)
    sock.sendall(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    )
    return sock


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_client_that_leaves_frees_its_slot(
    live: Live, engine: FakeEngine, stream: bool, phase: str
) -> None:
    engine.script = Script(prefill_s=30) if phase == "prefill" else LONG
    sock = raw_post(live, {"stream": stream, "n": 2})
    wait_for(lambda: engine.n_busy == 2)
    if phase == "decode" and stream:
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
    left = time.monotonic()
    sock.close()
    wait_for(lambda: engine.n_busy == 0, 2.0)
    assert set(engine.cancelled) == {"0", "1"} and max(engine.cancelled.values()) - left < 2.0


def test_a_queued_request_leaves_the_queue_with_its_client(live: Live, engine: FakeEngine) -> None:
    engine.script = Script(prefill_s=30)
    socks = [raw_post(live, {}) for _ in range(6)]
    wait_for(lambda: engine.n_busy == 6)
    for sock in reversed(socks):
        sock.close()
    wait_for(lambda: len(engine.cancelled) == 6)


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_bug(
    live: Live, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as sock:
        sock.sendall(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        wait_for(lambda: live.server.service.reading.n_byte == 1)
    wait_for(lambda: live.server.service.reading.n_byte == 0)
    assert not engine.seen and "Exception" not in caplog.text


def test_a_finished_request_is_not_cancelled(live: Live, engine: FakeEngine) -> None:
    for stream in (True, False):
        httpx.post(f"{live.url}/v1/chat/completions", json={"messages": MESSAGES, "stream": stream})
    wait_for(lambda: live.server.service.n_jobs == 0)
    assert engine.n_done == 2 and not engine.cancelled


def test_clients_leaving_at_any_moment_leak_nothing(live: Live, engine: FakeEngine) -> None:
    engine.script = Script(text="x" * 60, round_s=0.001)
    draw = random.Random(7)
    for _ in range(12):
        socks = [raw_post(live, {"stream": draw.random() < 0.5}) for _ in range(8)]
        for sock in draw.sample(socks, len(socks)):
            time.sleep(draw.uniform(0, 0.004))
            sock.close()
    service = live.server.service
    wait_for(lambda: engine.n_busy == service.n_jobs == service.n_inside == 0)
    assert httpx.post(f"{live.url}/completion", json={"prompt": "x"}).json()["tokens_predicted"] == 60


def test_a_slow_reader_loses_its_request_not_the_engines_time(serve: Serve, engine: FakeEngine) -> None:
    live = serve(Limits(stream_buffer=20_000, drain_s=0.2))
    engine.script = Script(text="é" * 200, width=1, round_s=0.0)
    engine.info = replace(engine.info, n_ctx=10**6)
    sock = raw_post(live, {"stream": True, "ignore_eos": True, "logprobs": True, "top_logprobs": 2})
    wait_for(lambda: "0" in engine.cancelled, 8.0)
    wait_for(lambda: engine.n_busy == 0)
    assert httpx.get(f"{live.url}/health").status_code == 200
    sock.close()


def test_silence_is_filled_with_comments(live: Live, engine: FakeEngine) -> None:
    engine.script = Script(prefill_s=0.2)
    body = {"messages": MESSAGES, "stream": True, "sse_ping_interval": 0.05}
    response = httpx.post(f"{live.url}/v1/chat/completions", json=body)
    assert response.content.startswith(b": ping\n\n")
    assert list(parse_events(response.content))[-1] == "[DONE]"


def test_a_request_past_its_time_is_ended_with_an_error(serve: Serve, engine: FakeEngine) -> None:
    live = serve(Limits(total_s=0.1, drain_s=0.2))
    engine.script = Script(prefill_s=30)
    assert "longer than 0.1 s" in refusal(
        httpx.post(f"{live.url}/completion", json={"prompt": "x"}), 503
    )
    wait_for(lambda: engine.n_busy == 0)


def test_a_flood_gets_429_and_the_server_recovers(live: Live, engine: FakeEngine) -> None:
    engine.script = Script(round_s=0.02)

    async def flood() -> list[int]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=live.url, limits=limits, timeout=20) as client:
            jobs = [client.post("/completion", json={"prompt": "x"}) for _ in range(80)]
            return [response.status_code for response in await asyncio.gather(*jobs)]

    codes = asyncio.run(flood())
    assert set(codes) == {200, 429} and codes.count(200) >= 4
    assert httpx.post(f"{live.url}/completion", json={"prompt": "x"}).status_code == 200
    wait_for(lambda: engine.n_busy == 0)


def test_a_header_too_long_is_refused(live: Live) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 40_000)
        assert sock.recv(100).startswith(b"HTTP/1.1 431")


def test_shutting_down_waits_then_ends_streams_with_an_error(serve: Serve, engine: FakeEngine) -> None:
    live = serve(Limits(drain_s=0.3))
    engine.script = LONG
    with httpx.stream(
        "POST", f"{live.url}/v1/chat/completions", json={"messages": MESSAGES, "stream": True}
    ) as response:
        chunks = response.iter_bytes()
        raw = next(chunks)
        live.server.should_exit = True
        raw += b"".join(chunks)
    events = list(parse_events(raw))
    assert events[-1] == "[DONE]" and events[-2]["error"]["type"] == "unavailable_error"
    assert len(events) > 8, "the stream was cut before the drain was over"
    live.thread.join(timeout=5)
    assert not live.thread.is_alive()
    wait_for(lambda: engine.n_busy == 0)


@contextlib.contextmanager
def served_process(n_round: int, *, before: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves answers of `n_round` rounds of 20 ms, and its URL. before: code to run first"""
    code = f"""
        {before}
        from server_fakes import FakeEngine, Script
        from pyspec.server.http.serve import run
        from pyspec.server.settings import ServerSettings
        import logging
        logging.basicConfig(level="INFO", format="%(name)s %(message)s")
        engine = FakeEngine(n_ctx=100_000)
        engine.script = Script(text="xyz" * {n_round}, round_s=0.02)
        run(lambda: engine, ServerSettings(port=0), lambda engine, urls: print(urls[0], flush=True))
    """
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parents[1]}"}
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_process_cleanly_after_the_answer(sig: signal.Signals) -> None:
    heard = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # independent of the tests' own environment
    with served_process(n_round=20, before=heard) as (process, url):
        with httpx.stream(
            "POST", f"{url}/completion", json={"prompt": "x", "stream": True}, timeout=10
        ) as response:
            chunks = response.iter_bytes()
            raw = next(chunks)
            process.send_signal(sig)
            if sig == signal.SIGHUP:  # the shell says it, and so does the system
                time.sleep(0.1)
                process.send_signal(sig)
            raw += b"".join(chunks)
        assert list(parse_events(raw))[-1]["tokens_predicted"] == 60
        assert process.wait(timeout=5) == 0


@pytest.mark.slow
def test_under_nohup_a_terminal_that_is_gone_ends_nothing() -> None:
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with served_process(n_round=20, before=ignoring) as (process, url):
        process.send_signal(signal.SIGHUP)
        for _ in range(2):
            assert (
                httpx.post(f"{url}/completion", json={"prompt": "x"}, timeout=10).json()[
                    "tokens_predicted"
                ]
                == 60
            )
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=5) == 0


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once() -> None:
    body = {"prompt": "x", "stream": True}
    with (
        served_process(n_round=10_000) as (process, url),
        httpx.stream("POST", f"{url}/completion", json=body, timeout=10) as response,
    ):
        chunks = response.iter_bytes()
        next(chunks)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None, "it did not wait for the running request"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=3) == 0
        chunks.close()
        assert process.stderr is not None
        said = process.stderr.read()
    assert "Traceback" not in said and "ending at once; requests that are cut off: 1" in said
    assert "running requests: 1; they get 30 s, or until a second signal" in said


def test_a_signal_writes_nothing_where_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    """A signal may interrupt a log write, and an error there would leave the server running."""
    settings = ServerSettings(port=0, limits=Limits(drain_s=0.2))
    fake = FakeEngine()
    server = make_server(create_app(fake, settings), settings)
    written: list[str] = []
    here = threading.get_ident()  # the server's thread may write at any time

    class Strict(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if threading.get_ident() == here:
                written.append(record.getMessage())

    handler, ours = Strict(), logging.getLogger("pyspec.server.http.serve")
    ours.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, ours.name):
            thread = threading.Thread(
                target=server.run, kwargs={"sockets": [bind(settings)]}, daemon=True
            )
            thread.start()
            wait_for(lambda: server.started)
            for sig in (signal.SIGTERM, signal.SIGTERM):
                server.handle_exit(sig, None)
                assert server.should_exit
            assert written == [] and server.force_exit
            thread.join(20)
    finally:
        ours.removeHandler(handler)
        fake.close()
    assert [r.getMessage() for r in caplog.records if "ending" in r.getMessage()] == ["ending", "ending at once"]  # fmt: skip
