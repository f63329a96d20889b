"""The benchmark's HTTP clients: one process for all streams, so that reading them does not use the server's GIL.

`python -m pyspec.bench.client PORT` reads one JSON list of request bodies per line and answers with one JSON object: the start
of the turn, and for each stream the times and numbers of its tokens and its last object. Times are `time.perf_counter`, one clock
for all processes of a machine.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.client import HTTPConnection, HTTPException
from typing import Any

TIMEOUT_S = 600.0
PATH = "/completion"  # its chunks carry token ids


def read(
    port: int, body: dict[str, Any], start: threading.Event, reads: list[tuple[float, bytes]]
) -> None:
    """Send one streaming request and store the received bytes with the time of each read. Parsing happens later."""
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.connect()
        start.wait()
        connection.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            text = answer.read(300).decode("utf-8", "replace")
            raise HTTPException(f"status {answer.status}: {text}")
        while data := answer.read1(1 << 16):
            reads.append((time.perf_counter(), data))
    except (OSError, HTTPException) as e:
        failed = {"error": {"message": f"{type(e).__name__}: {e}"}}
        reads.append((time.perf_counter(), f"\n\ndata: {json.dumps(failed)}\n\n".encode()))
    finally:
        connection.close()


def parse(reads: list[tuple[float, bytes]]) -> dict[str, Any]:
    """`events` [(seconds, tokens), ...] of one stream, its end time `ended`, and its `last` object: the final one or an error."""
    events: list[tuple[float, int]] = []
    last: dict[str, Any] = {"error": {"message": "the stream ended without a final object"}}
    rest = b""
    for now, data in reads:
        *whole, rest = (rest + data).split(b"\n\n")
        for part in whole:
            if not part.startswith(b"data: "):
                continue
            value = json.loads(part[6:])
            if value.get("tokens"):
                events.append((now, len(value["tokens"])))
            if value.get("stop") or "error" in value:
                last = value
    return {"events": events, "last": last, "ended": reads[-1][0] if reads else time.perf_counter()}


def turn(port: int, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Run all streams concurrently, once."""
    start = threading.Event()
    reads: list[list[tuple[float, bytes]]] = [[] for _ in bodies]
    streams = zip(bodies, reads, strict=True)
    threads = [threading.Thread(target=read, args=(port, b, start, r)) for b, r in streams]
    for t in threads:
        t.start()
    began = time.perf_counter()
    start.set()
    for t in threads:
        t.join()
    return {"began": began, "streams": [parse(r) for r in reads]}


def main() -> None:
    port = int(sys.argv[1])
    for line in sys.stdin:
        sys.stdout.write(json.dumps(turn(port, json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
