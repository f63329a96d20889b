"""Requests that can be read in two ways, or in none: a 4xx or 5xx, a closed connection, and no traceback."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import h11
import httpx
import pytest
from server_fakes import FakeEngine, Script
from server_live import Live
from uvicorn import Config
from uvicorn.server import ServerState
from waiting import wait_for

from pyspec.server.http.connections import WRITE_BUFFER, StrictConnection, protocol
from pyspec.server.settings import Limits

Serve = Callable[..., Live]
HOST = b"Host: localhost\r\n"
BODY = b'{"prompt":"hi"}'
GET, POST = b"GET /health HTTP/1.1\r\n", b"POST /completion HTTP/1.1\r\n"
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
TE = b"Transfer-Encoding: chunked\r\n"
EVIL = b"Host: evil.example\r\n\r\n"
THEN = b"GET /never HTTP/1.1\r\nHost: localhost\r\n\r\n"

REFUSED = {
    "both lengths": (400, POST + HOST + b"Content-Length: 4\r\n" + TE + b"\r\n" + CHUNKED),
    "both lengths, the other way round": (400, POST + HOST + TE + b"content-length: 15\r\n\r\n" + CHUNKED),
    "both lengths without a body": (400, GET + HOST + b"Content-Length: 0\r\n" + TE + b"\r\n0\r\n\r\n"),
    "chunked, then identity": (501, POST + HOST + b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKED),
    "identity": (501, POST + HOST + b"Transfer-Encoding: identity\r\n\r\n" + CHUNKED),
    "a coding that begins like one": (501, POST + HOST + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKED),
    "chunked twice": (501, POST + HOST + TE + TE + b"\r\n" + CHUNKED),
    "chunked in HTTP/1.0": (400, POST.replace(b"1.1", b"1.0") + HOST + TE + b"\r\n" + CHUNKED),
    "two equal lengths": (400, POST + HOST + 2 * b"Content-Length: 15\r\n" + b"\r\n" + BODY),
    "two lengths": (400, POST + HOST + b"Content-Length: 15\r\nContent-Length: 16\r\n\r\n" + BODY),
    "a list of equal lengths": (400, POST + HOST + b"Content-Length: 15, 15\r\n\r\n" + BODY),
    "a length with a sign": (400, POST + HOST + b"Content-Length: +15\r\n\r\n" + BODY),
    "a length in hex": (400, POST + HOST + b"Content-Length: 0xf\r\n\r\n" + BODY),
    "no length in its header": (400, POST + HOST + b"Content-Length: \r\n\r\n" + BODY),
    "a length of thirty digits": (400, POST + HOST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n" + BODY),
    "a folded header": (400, GET + HOST + b"X: a\r\n b\r\n\r\n"),
    "a header folded with a tab": (400, GET + HOST + b"X: a\r\n\tContent-Length: 7\r\n\r\n"),
    "a space before the first header": (400, GET + b" X: a\r\n" + HOST + b"\r\n"),
    "a space behind a name": (400, GET + HOST + b"X : a\r\n\r\n"),
    "a space behind the length's name": (400, POST + HOST + b"Content-Length : 15\r\n\r\n" + BODY),
    "a space in a name": (400, GET + HOST + b"X y: a\r\n\r\n"),
    "no name": (400, GET + HOST + b": a\r\n\r\n"),
    "no colon": (400, GET + HOST + b"abc\r\n\r\n"),
    "line feeds alone": (400, b"GET /health HTTP/1.1\nHost: localhost\n\n"),
    "one line feed alone": (400, GET + b"Host: localhost\nX: y\r\n\r\n"),
    "a return alone": (400, GET + b"Host: localhost\rX: y\r\n\r\n"),
    "a zero byte": (400, GET + HOST + b"X: a\0b\r\n\r\n"),
    "very many headers": (431, GET + HOST + b"".join(b"X%d: y\r\n" % i for i in range(300)) + b"\r\n"),
    "headers without an end": (431, GET + HOST + b"".join(b"X%d: y\r\n" % i for i in range(20_000)) + b"\r\n"),
    "a version of the future": (505, GET.replace(b"1.1", b"9.9") + HOST + b"\r\n"),
    "version 2": (505, GET.replace(b"1.1", b"2.0") + HOST + b"\r\n"),
    "version 0.9": (505, GET.replace(b"1.1", b"0.9") + HOST + b"\r\n"),
    "the preface of HTTP/2": (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "no host": (400, GET + b"\r\n"),
    "two hosts": (400, GET + HOST + EVIL),
    "an address without a host": (400, b"GET http:///slots HTTP/1.1\r\n" + EVIL),
    "an address with a port alone": (400, b"GET http://:80/slots HTTP/1.1\r\n" + EVIL),
    "an address that is a query": (400, b"GET http://?x HTTP/1.1\r\n" + EVIL),
    "an address with a user": (400, b"GET http://evil.example@localhost/slots HTTP/1.1\r\n" + EVIL),
    "an address of another scheme": (400, b"GET ftp://localhost/slots HTTP/1.1\r\n" + EVIL),
    "an address that is one when decoded": (400, b"GET http%3A//localhost/slots HTTP/1.1\r\n" + EVIL),
    "no slash": (400, b"GET health HTTP/1.1\r\n" + HOST + b"\r\n"),
    "a star that is read": (400, b"GET * HTTP/1.1\r\n" + HOST + b"\r\n"),
    "a tunnel": (501, b"CONNECT localhost:80 HTTP/1.1\r\n" + HOST + b"\r\n"),
    "a long path": (414, b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n" + HOST + b"\r\n"),
    "a long query": (414, b"GET /slots?" + b"a=1&" * 3000 + b" HTTP/1.1\r\n" + HOST + b"\r\n"),
    "two spaces": (400, b"GET  /health HTTP/1.1\r\n" + HOST + b"\r\n"),
    "a tab": (400, b"GET\t/health HTTP/1.1\r\n" + HOST + b"\r\n"),
    "a path that is not ASCII": (400, "GET /é HTTP/1.1\r\n".encode() + HOST + b"\r\n"),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    "empty lines": (400, b"\r\n\r\n\r\nhello\r\n\r\n"),
    "a chunk without a size": (400, POST + HOST + TE + b"\r\nzz\r\n"),
    "a chunk of less than nothing": (400, POST + HOST + TE + b"\r\n-1\r\n"),
    "a chunk that is longer than it says": (400, POST + HOST + TE + b"\r\n2\r\nabcd\r\n0\r\n\r\n"),
}  # fmt: skip


def connect(live: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), timeout=10)


def received(sock: socket.socket) -> bytes:
    """Everything until the server closes; a timeout fails the test."""
    out = b""
    with suppress(ConnectionError):
        while data := sock.recv(65536):
            out += data
    return out


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Callable[[], None]:
    """Asserts that the log holds no traceback and no error so far."""
    caplog.set_level(logging.INFO, "pyspec")

    def check() -> None:
        assert not [r.getMessage() for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR]

    return check


def test_what_can_be_read_in_two_ways_is_refused_and_its_connection_closed(
    serve: Serve, engine: FakeEngine, quiet: Callable[[], None]
) -> None:
    live = serve(Limits(drain_s=0.2, body_read_s=5))
    wrong = {}
    for name, (status, raw) in REFUSED.items():
        with connect(live) as sock:
            with suppress(ConnectionError):
                sock.sendall(raw + THEN)
            answer = received(sock)
        head, _, body = answer.partition(b"\r\n\r\n")
        said = json.loads(body)["error"] if body.startswith(b"{") else {}
        is_right = head.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in head.lower()
        if (
            not is_right
            or said.get("code") != status
            or b"bytearray" in body
            or answer.count(b"HTTP/1.1 ") > 1
        ):
            wrong[name] = answer
    assert not wrong, wrong
    assert not engine.seen
    quiet()


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("http://evil.example/slots", "localhost", 403),
        ("http://%6cocalhost/slots", "evil.example", 403),
        ("http://localhost.evil.example:80/slots", "localhost", 403),
        ("HTTP://LOCALHOST/health", "evil.example", 403),
        ("http://localhost:7/slots", "evil.example", 200),
        ("https://127.0.0.1/slots?fail_on_no_slot=0", "evil.example", 200),
        ("http://[::1]/health", "evil.example", 200),
        ("/slots?x=http://evil.example/", "localhost", 200),
        ("//evil.example/slots", "localhost", 404),
        ("/%00", "localhost", 404),
        ("/" + "a" * 5000, "localhost", 404),
        ("/v1/models/" + "%00" * 1700, "localhost", 404),
        ("/v1/models/%ed%a0%80", "localhost", 404),
        ("/../../etc/passwd", "localhost", 404),
        ("/page/%2e%2e%2fstyle.css", "localhost", 404),
    ],
)
def test_paths_and_addresses(
    live: Live, quiet: Callable[[], None], path: str, host: str, status: int
) -> None:
    with connect(live) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = received(sock)
    assert answer.startswith(b"HTTP/1.1 %d " % status) and len(answer) < 40_000
    if status == 404:
        assert len(answer) < 1000  # the path is not repeated as a whole
    quiet()


def test_a_body_that_goes_wrong_behind_its_answer_is_no_traceback(
    live: Live, quiet: Callable[[], None]
) -> None:
    with connect(live) as sock:
        sock.sendall(b"POST /nope HTTP/1.1\r\n" + HOST + TE + b"\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 404")
        with suppress(ConnectionError):
            sock.sendall(b"zz\r\n" * 1000)
        received(sock)
    assert httpx.get(f"{live.url}/health").status_code == 200
    quiet()


def test_a_method_of_thousands_of_letters_is_not_repeated(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pyspec")
    response = httpx.request("A" * 5000, f"{live.url}/health")
    assert response.status_code == 405 and len(response.content) < 500
    # The server writes it behind the answer
    wait_for(lambda: any(record.name == "pyspec.access" for record in caplog.records), 20)
    assert all(
        len(record.getMessage()) < 300 for record in caplog.records if record.name == "pyspec.access"
    )


def test_what_is_right_is_served_as_before(live: Live) -> None:
    """One behind the other on one connection."""
    asked = [
        POST + HOST + TE + b"\r\n" + CHUNKED[:-2] + b"X: y\r\n\r\n",  # with a trailer
        GET.replace(b"1.1", b"1.2") + HOST + b"Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
        GET.replace(b"1.1", b"1.0") + b"\r\n",
    ]
    with connect(live) as sock:
        sock.sendall(b"".join(asked))
        answer = received(sock)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"200", b"404", b"200"]
    assert b"Hello, world" in answer


# -- clients that do not read ----------------------------------------------------------------------------------------

STREAM = json.dumps({"prompt": "hi", "stream": True}).encode()


def ask(sock: socket.socket) -> None:
    sock.sendall(POST + HOST + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM)


def deaf(live: Live) -> socket.socket:
    """A client that sends a request and reads nothing, with a small receive buffer."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", live.port))
    ask(sock)
    return sock


@pytest.mark.slow
def test_readers_who_do_not_read_lose_their_slots_to_one_who_does(
    serve: Serve, engine: FakeEngine, quiet: Callable[[], None]
) -> None:
    """More requests from one address than slots, with long answers."""
    engine.info = replace(engine.info, n_ctx=10_000_000)
    engine.script = Script(text="x" * 90_000, width=20, round_s=0.001)
    live = serve(Limits(stalled_s=0.05))
    held = [deaf(live) for _ in range(9)]
    wait_for(lambda: len(engine.seen) >= 9, 30)
    engine.script = Script(text="short")
    answer = httpx.post(f"{live.url}/completion", content=BODY, timeout=60)
    assert answer.json()["content"] == "short"
    wait_for(lambda: engine.n_busy == 0, 60)
    assert len(engine.cancelled) >= 9
    quiet()
    for sock in held:
        sock.close()


def test_a_slow_reader_hears_why_its_answer_ends(
    serve: Serve, engine: FakeEngine, quiet: Callable[[], None]
) -> None:
    engine.info = replace(engine.info, n_ctx=10_000_000)
    engine.script = Script(text="x" * 90_000, width=20, round_s=0.001)
    live = serve(Limits(stalled_s=60, stream_buffer=20_000))
    with deaf(live) as sock:
        wait_for(lambda: engine.n_busy == 1, 30)
        wait_for(lambda: engine.n_busy == 0, 60)  # its slot is free before it reads on
        sock.settimeout(60)
        answer = b""
        while b"0\r\n\r\n" not in answer[-64:]:
            answer += sock.recv(65536)
    assert b"read more slowly than written" in answer and b"unavailable_error" in answer
    quiet()


class SlowPipe(asyncio.Transport):
    """A transport whose other end reads as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.unread, self.is_aborted = 0, False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted


class Alarms:
    """A loop's clock that a test moves."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, seconds: float, what: Callable[..., None], *args: object) -> Alarms:
        self.due.append((seconds, lambda: what(*args)))
        return self

    def cancel(self) -> None:
        self.due.clear()

    def ring(self) -> float:
        seconds, what = self.due.pop()
        what()
        return seconds


@pytest.mark.parametrize(("reads", "is_given_up"), [((0,), True), ((1, 0), True), ((700, 1, 31), False)])
def test_who_reads_little_has_time_and_who_reads_nothing_has_not(
    reads: tuple[int, ...], is_given_up: bool
) -> None:
    limits = Limits(stalled_s=7.5)
    alarms, pipe = Alarms(), SlowPipe()
    made = protocol(limits)(
        config=Config(lambda: None, log_config=None),
        server_state=ServerState(),
        app_state={},
        _loop=alarms,
    )  # type: ignore[arg-type, call-arg]
    made.connection_made(pipe)
    alarms.cancel()  # of the time for headers
    assert pipe.high == WRITE_BUFFER
    pipe.unread = 90_000
    made.pause_writing()
    for n in reads:
        pipe.unread -= n
        assert alarms.ring() == 7.5
    assert pipe.is_aborted is is_given_up and len(alarms.due) == (not is_given_up)
    if not is_given_up:
        made.resume_writing()
        assert not alarms.due


def test_h11_still_reports_what_the_checks_rely_on() -> None:
    """The head's bytes are separated from the following ones by h11's unread rest."""
    conn = h11.Connection(h11.SERVER)
    conn.receive_data(POST + HOST + b"Content-Length: 2\r\n\r\n{}rest")
    assert isinstance(conn.next_event(), h11.Request) and conn.trailing_data[0] == b"{}rest"


def test_a_head_that_comes_a_byte_at_a_time_is_looked_at_as_a_whole() -> None:
    conn = StrictConnection(32 << 10)
    head = GET + HOST + b"X: " + b"y" * 3000 + b"\r\n z\r\n\r\n"
    for byte in head[:-1]:
        conn.receive_data(bytes([byte]))
        assert conn.next_event() is h11.NEED_DATA
    conn.receive_data(head[-1:])
    with pytest.raises(h11.RemoteProtocolError, match="folded"):
        conn.next_event()
