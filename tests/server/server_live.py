"""A server on a real port, and helpers that wait for its reactions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from server_fakes import FakeEngine

from pyspec.server.http.serve import Server


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


def wait_for(claim: Callable[[], bool], timeout_s: float = 60.0) -> float:
    """Wait until `claim` holds; the seconds it took. Fails after `timeout_s`."""
    start = time.monotonic()
    while not claim():
        assert time.monotonic() - start < timeout_s, "it did not happen in time"
        time.sleep(0.005)
    return time.monotonic() - start
