"""Connections: their number, and time limits for headers and for reading.

uvicorn has no time limit for headers, and a server without free file descriptors accepts no connection. A connection that does not send
its headers in time is closed. At the limit, an idle connection makes room: the longest idle one of the client with the most. A client
that reads nothing of its answer is disconnected, so that its request ends and its slot is free.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pyspec.server.http.envelope import TYPES, Refused, dumps, error_body
from pyspec.server.http.listen import BACKLOG
from pyspec.server.settings import Limits

# -- heads that can be read in two ways ------------------------------------------------------------------------------
# Strict checks of a request's head. RFC 9112 lets a server tolerate some errors, and h11 does; two parsers that tolerate different ones
# see two different requests in the same bytes (request smuggling). So an ambiguous head is refused and its connection closed.

MOST_LINES = 256  # header lines of one request
MOST_TARGET = 8192  # bytes of a path with its query
TARGET = re.compile(rb"(?i)/.*|https?://.*")
ABSOLUTE = re.compile(rb"(?i)https?://([^/?#]*)(.*)")
BARE_LF = re.compile(rb"(?<!\r)\n")
FOLDED = re.compile(rb"\n[ \t]")
ONCE = (b"content-length", b"transfer-encoding", b"host")


class StrictConnection(h11.Connection):
    """h11's server side. `next_event` raises RemoteProtocolError with the answer's status if `flaw_of` finds a flaw, and stores it in `flaw`."""

    def __init__(self, most_head: int) -> None:
        super().__init__(h11.SERVER, most_head)
        self.flaw: h11.RemoteProtocolError | None = None

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        before = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                head = before[: len(before) - len(self.trailing_data[0])]
                if (found := flaw_of(head, event)) is not None:
                    raise h11.RemoteProtocolError(found[1], error_status_hint=found[0])
        except h11.RemoteProtocolError as e:
            self.flaw = e
            raise
        return event


def flaw_of(head: bytes, request: h11.Request) -> tuple[int, str] | None:
    """(status, reason) if a request must be refused, else None. head: its bytes up to the empty line."""
    names = Counter(name.lower() for name, _ in request.headers)
    lines = head.split(b"\n")
    raw_names = Counter(line.partition(b":")[0].lower() for line in lines[1:])
    target = request.target
    if not request.http_version.startswith(b"1."):
        return 505, f"HTTP/{request.http_version.decode()} is not spoken here; send HTTP/1.1"
    if len(target) > MOST_TARGET:
        return 414, f"the path has {len(target)} bytes; at most {MOST_TARGET} are taken"
    if len(lines) > MOST_LINES + 3:  # plus the request line, the empty line, and the rest after it
        return 431, f"the request has more than {MOST_LINES} header lines"
    if BARE_LF.search(head):
        return 400, "a line of the head ends in LF alone; end it in CR LF"
    if FOLDED.search(head):
        return 400, "a header is folded over two lines; write it on one"
    if twice := next((name for name in ONCE if raw_names[name] > 1), None):
        return 400, f"the header {twice.decode()} is there twice"
    # h11 reads "5, 5" as 5
    if any(line.lower().startswith(b"content-length:") and b"," in line for line in lines):
        return 400, "the header content-length has more than one value"
    if names[b"transfer-encoding"] and names[b"content-length"]:
        return 400, "Content-Length and Transfer-Encoding contradict each other; send one of them"
    if names[b"transfer-encoding"] and request.http_version == b"1.0":
        return 400, "HTTP/1.0 has no Transfer-Encoding; send Content-Length"
    return _target_flaw(request.method, target)


def _target_flaw(method: bytes, target: bytes) -> tuple[int, str] | None:
    if method == b"CONNECT":
        return 501, "this server is no proxy"
    if target == b"*" and method == b"OPTIONS":
        return None
    if not TARGET.fullmatch(target):
        return 400, "the request's target is neither a path nor an http address"
    if found := ABSOLUTE.fullmatch(target):
        host = re.sub(rb":\d*$", b"", found[1])
        if not host or b"@" in host:
            return 400, "the address in the request has no host, or a user in it"
    return None


log = logging.getLogger(__name__)

SPARE = 24  # file descriptors reserved for other uses
LEAST = 8
BURSTS = 3  # bursts of accepted connections before the first of them is closed again
PROBES_S = (0.0, 0.05, 0.5)  # after the client's end of input; then every PROBE_S
PROBE_S = 2.0
PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"
# h11 repeats the received bytes in its messages
QUOTING = re.compile(r"(: | )bytearray\(.*", re.DOTALL)
PARTS = "pyspec.parts"
"""Key of a request's `scope["state"]` with its `GuardedProtocol`, to which parts of a streamed answer go straight: a task, five wrappers and an
HTTP state machine for each token of each stream took two thirds of the server's time."""
LINGER_S = 1.0  # a refused client that is still sending gets this time to read the answer
WRITE_BUFFER = 32 << 10
"""Unread bytes per connection before its writer has to wait; the system buffers as many again."""


def most_connections(limits: Limits) -> int:
    """The limit of the settings, or the number that the file descriptors allow, minus connections that are accepted at once."""
    room = _room(limits)
    return max(LEAST, min(limits.connections, room - (BURSTS - 1) * burst(limits)))


def burst(limits: Limits) -> int:
    """Connections that are accepted at once: if file descriptors run out then, asyncio accepts none for a second."""
    return max(LEAST, min(BACKLOG, _room(limits) // 8))


def _room(limits: Limits) -> int:
    try:
        import resource

        n_open = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 32
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - n_open - SPARE
    except (ImportError, OSError, ValueError):
        return 8 * max(BACKLOG, limits.connections)


class Connections:
    """The open connections, ordered by their last request."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.most = limits, most_connections(limits)
        self.open: dict[GuardedProtocol, None] = {}

    def enter(self, new: GuardedProtocol) -> bool:
        """Count a connection. At the limit, close an idle one of the client with the most; False if none is idle."""
        if len(self.open) >= self.most:
            idle = [other for other in self.open if other.is_idle]
            if not idle:
                return False
            held = Counter(other.host for other in self.open)
            # the first one has been idle for longest
            max(idle, key=lambda other: held[other.host]).drop()
        self.open[new] = None
        return True

    def used(self, connection: GuardedProtocol) -> None:
        """Note that the connection has sent a request."""
        if connection in self.open:
            del self.open[connection]
            self.open[connection] = None

    def leave(self, connection: GuardedProtocol) -> None:
        self.open.pop(connection, None)


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol with time limits for headers and for reading, answers to clients that have closed their half, and refusal of
    requests that can be parsed in two ways."""

    guard: Connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = self._strict = StrictConnection(self.guard.limits.header)
        self.app_state = {**self.app_state, PARTS: self}  # copied into each request's scope
        self._header_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._is_half_closed = self._is_refused = False

    @property
    def host(self) -> str:
        """The client's address; one value for all clients of a unix socket."""
        return self.client[0] if self.client else ""

    @property
    def is_idle(self) -> bool:
        """True if no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def drop(self) -> None:
        """Close it now."""
        self.guard.leave(self)
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn: a TCP server passes one
        super().connection_made(transport)
        if not self.guard.enter(self):
            log.warning("%d connections are open and busy: closing a new one", self.guard.most)
            transport.abort()
            return
        _bound(transport)
        self._time_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self.guard.leave(self)
        self.app_state.pop(PARTS, None)
        for timer in (self._header_timer, self._probe_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:  # still within the headers
            self._time_headers()
        else:
            self.guard.used(self)
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

    def _time_headers(self) -> None:
        if self._header_timer is None:
            limit_s = self.guard.limits.header_read_s
            self._header_timer = self.loop.call_later(limit_s, self._late)

    def _late(self) -> None:
        self._header_timer = None
        if self.is_idle and self.transport is not None and not self.transport.is_closing():
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio asks whether to keep it open
        """The client sends no more. It may still read; a later write shows if it does."""
        if self._is_refused:
            return False
        is_waiting = self.cycle is not None and not self.cycle.response_complete
        if self.conn.their_state is h11.SEND_BODY:  # the rest of the body will never come
            return False
        if not is_waiting or self.scope is None or self.scope.get("http_version") != "1.1":
            return False
        self._is_half_closed = True
        self._probe(0)
        return True  # keep the transport open for writing

    # -- parts of a streamed answer (stream.py) ------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """A part of the answer may be written now: its head was sent, its end was not, and the client reads."""
        cycle = self.cycle
        return (
            cycle is not None
            and cycle.response_started
            and not (cycle.response_complete or cycle.disconnected or self.flow.write_paused)
            and cycle.scope["http_version"]
            == "1.1"  # so the answer has chunks, as its length is not known
            and self.conn.our_state is h11.SEND_BODY
            and not self.transport.is_closing()
        )

    def write_part(self, data: bytes) -> None:
        """Write a part of the answer's body, which is not empty. On the event loop."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    # -- clients that do not read --------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The unread data has passed the limit."""
        super().pause_writing()
        self._time_reading()

    def _time_reading(self) -> None:
        limit_s = self.guard.limits.stalled_s
        self._stall_timer = self.loop.call_later(limit_s, self._stalled, self._unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    @property
    def _unread(self) -> int:
        return self.transport.get_write_buffer_size()

    def _stalled(self, unread: int) -> None:
        """Disconnect a client that has read nothing for the whole limit; a slow one gets more time. unread: bytes at the start of the limit"""
        self._stall_timer = None
        if self._unread < unread:
            self._time_reading()
            return
        limit_s = self.guard.limits.stalled_s
        log.warning("closing a connection: its client has read nothing for %g s", limit_s)
        self.drop()

    # -- requests that are not answered -------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no request, or an ambiguous one, and close: the bytes after it may not start a request."""
        self._is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:  # the error is in its body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer is being sent
            self.transport.close()
            return
        flaw = self._strict.flaw
        status = flaw.error_status_hint if flaw is not None else 400
        why = QUOTING.sub("", str(flaw or msg))
        status = status if status in TYPES else 400
        self._answer_and_close(Refused(status, f"the request can not be read: {why}"))

    def _answer_and_close(self, refusal: Refused) -> None:
        """Write the answer, end the stream, and let the client finish: a client that is still sending would see a reset instead."""
        body = dumps(error_body(refusal)).encode()
        phrase = HTTPStatus(refusal.status).phrase
        head = (
            f"HTTP/1.1 {refusal.status} {phrase}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._probe_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore an upgrade request, as a server may, without a log line."""

    # -- half closed --------------------------------------------------------------------------------------------------

    def _probe(self, i: int) -> None:
        """Write to the client: if it is gone it answers with a reset, which ends the connection at the next write."""
        if self.transport is None or self.transport.is_closing() or self.is_idle:
            return
        if not self.cycle.response_started:
            self.transport.write(PROCESSING)
        wait_s = PROBES_S[i] if i < len(PROBES_S) else PROBE_S
        self._probe_timer = self.loop.call_later(max(wait_s, 0.01), self._probe, i + 1)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_half_closed and self.transport is not None:
            self.transport.close()


def _bound(transport: asyncio.Transport) -> None:
    """Bound unread data in this process and in the system. Otherwise megabytes are buffered and a client that does not read is not noticed."""
    transport.set_write_buffer_limits(high=WRITE_BUFFER)
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # asyncio sets this only for sockets that name their protocol
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, WRITE_BUFFER)


def protocol(limits: Limits) -> Callable[..., GuardedProtocol]:
    """The protocol class of one server."""
    return type("ServerProtocol", (GuardedProtocol,), {"guard": Connections(limits)})
