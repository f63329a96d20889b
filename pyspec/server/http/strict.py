"""Strict checks of a request's head. RFC 9112 lets a server tolerate some errors, and h11 does; two parsers that tolerate different ones
see two different requests in the same bytes (request smuggling). So an ambiguous head is refused and its connection closed.
"""

from __future__ import annotations

import re
from collections import Counter

import h11

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
