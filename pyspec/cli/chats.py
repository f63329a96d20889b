"""Serve an engine on this machine, and stream several concurrent chats from it over plain HTTP."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspec.errors import PyspecError, Unavailable

if TYPE_CHECKING:
    from pyspec.server.engine import EngineLike

TIMEOUT_S = 120.0


@dataclass
class DemoChat:
    """One question and its answer. `text` grows while the answer streams in; any thread may read it."""

    question: str
    text: str = ""
    finish: str = ""
    n_predicted: int = 0
    rate: float = 0.0  # tokens/s after the first token, measured by the server
    mean_len: float = 1.0  # tokens a round
    acceptance: float = 0.0  # accepted / drafted
    n_drafted: int = 0
    error: str = ""
    seconds: float = field(default=0.0)


@contextlib.contextmanager
def served(engine: EngineLike) -> Iterator[int]:
    """Serve `engine` on a free loopback port in a thread; yields the port. Raises Unavailable if it does not start."""
    from pyspec.server.app import create_app
    from pyspec.server.http.serve import bind, make_server
    from pyspec.server.settings import Limits, ServerSettings

    settings = ServerSettings(port=0, limits=Limits(drain_s=2.0))
    ready = threading.Event()
    with bind(settings) as sock:
        server = make_server(create_app(engine, settings), settings, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="pyspec-server")
        thread.start()
        try:
            if not ready.wait(20.0):
                raise Unavailable("the server did not start within 20 s")
            yield sock.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def send_chat(port: int, chat: DemoChat, speculative: bool) -> None:
    """Send one chat and read its stream into `chat`. Errors are stored in `chat.error`."""
    from http.client import HTTPConnection, HTTPException

    began = time.perf_counter()
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        body = {
            "messages": [{"role": "user", "content": chat.question}],
            "stream": True,
            "temperature": 0,
            "cache_prompt": False,
            "speculative": speculative,
        }
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise HTTPException(
                f"status {answer.status}: {answer.read(300).decode('utf-8', 'replace')}",
            )
        for line in answer:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                _take(chat, json.loads(line[6:]))
    except (OSError, HTTPException, ValueError) as e:
        chat.error = f"{type(e).__name__}: {e}"
    finally:
        connection.close()
        chat.seconds = time.perf_counter() - began


def _take(chat: DemoChat, event: dict) -> None:
    if "error" in event:
        chat.error = str(event["error"].get("message", event["error"]))
        return
    for choice in event.get("choices", ()):
        chat.text += choice["delta"].get("content") or ""
        chat.finish = choice.get("finish_reason") or chat.finish
    if timings := event.get("timings"):
        chat.n_predicted, chat.rate = timings["predicted_n"], timings["predicted_per_second"]
        chat.n_drafted = timings.get("draft_n", 0)
    if spec := event.get("metrics", {}).get("speculative_decoding"):
        chat.mean_len = spec["mean_acceptance_length"]
        chat.acceptance = spec["draft_acceptance_rate"]


@dataclass(frozen=True)
class DemoBatch:
    """Concurrent chats, and the time from the first request to the last answer."""

    chats: Sequence[DemoChat]
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens of all streams per second, prompts and HTTP included."""
        return sum(c.n_predicted for c in self.chats) / self.seconds

    @property
    def error(self) -> str:
        """The first error, or ""."""
        for c in self.chats:
            if c.error or c.finish != "stop":
                why = c.error or f"ended with {c.finish!r}, not with an end token"
                return f"{c.question!r}: {why}"
        return ""


def run_chats(
    port: int,
    questions: Sequence[str],
    speculative: bool,
    watch: Callable[[Sequence[DemoChat], bool], None] | None = None,
) -> DemoBatch:
    """Send all questions at once and wait. `watch(chats, is_over)` is called about ten times a second.

    Raises PyspecError if any of them failed.
    """
    chats = [DemoChat(q) for q in questions]
    each = [(port, chat, speculative) for chat in chats]
    threads = [threading.Thread(target=send_chat, args=args, daemon=True) for args in each]
    began = time.perf_counter()
    for t in threads:
        t.start()
    while watch is not None and any(t.is_alive() for t in threads):
        watch(chats, False)
        time.sleep(0.1)
    for t in threads:
        t.join()
    # time of the slowest stream's own clock: drawing must not lengthen the measurement
    seconds = time.perf_counter() - began
    batch = DemoBatch(chats, seconds if watch is None else max(c.seconds for c in chats))
    if watch is not None:
        watch(chats, True)
    if batch.error:
        raise PyspecError(batch.error)
    return batch
