"""Chats over several replicas of a server, one of which is killed again and again. Every text is compared with that of one undisturbed engine.

`python tests/long_runs/replicas.py MODEL --replicas 4 --minutes 10 --every 60`. Arguments behind `--` go to both servers.
Exit status 1 if a request fails, if a text differs, or if the share of cached prompt tokens is below 0.85 of one engine's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from served_command import Served

WORDS = [
    "red",
    "green",
    "blue",
    "one",
    "two",
    "three",
    "dog",
    "cat",
    "house",
    "river",
    "music",
    "stone",
    "winter",
    "summer",
    "paper",
    "train",
]
SYSTEMS = 3
SHARE = 0.85  # of one engine's hits


def message(seed: int, n: int) -> str:
    """Words that the same seed always gives."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(n))


@dataclass
class Totals:
    """Of all answers of a run."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    n_put_off: int = 0  # answers with 429

    @property
    def hits(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)


class Chats:
    """Conversations over one port: each of some turns, in which the answers so far are sent again.

    texts  by conversation and turn: the first run writes them, the second compares
    """

    def __init__(self, n_turn: int, n_token: int) -> None:
        self.n_turn, self.n_token = n_turn, n_token
        self.texts: dict[tuple[int, int], str] = {}
        self.lock = threading.Lock()

    def run(self, port: int, number: int, totals: Totals) -> None:
        """One conversation."""
        said = [{"role": "system", "content": message(number % SYSTEMS, 60)}]
        for turn in range(self.n_turn):
            said.append({"role": "user", "content": message(1000 * number + turn + 17, 12)})
            body = {"messages": said, "max_tokens": self.n_token, "seed": number, "temperature": 0.7 * (number % 2)}  # fmt: skip
            try:
                text, n_prompt, n_cached = asked_again(port, body, totals)
            except (OSError, ValueError, KeyError) as e:
                with self.lock:
                    totals.errors.append(f"conversation {number}, turn {turn}: {type(e).__name__}: {e}")
                return
            said.append({"role": "assistant", "content": text})
            with self.lock:
                totals.answers += 1
                totals.prompt_tokens += n_prompt
                totals.cached_tokens += n_cached
                if self.texts.setdefault((number, turn), text) != text:
                    totals.errors.append(f"conversation {number}, turn {turn}: another text")
                    return


class PutOff(Exception):
    """The server takes no more requests of this client for now (429)."""


def asked_again(port: int, body: dict, totals: Totals) -> tuple[str, int, int]:
    """`asked`, as often as it takes: as clients do, it comes back a second after a 429."""
    while True:
        try:
            return asked(port, body)
        except PutOff:
            totals.n_put_off += 1
            time.sleep(1)


def asked(port: int, body: dict) -> tuple[str, int, int]:
    """A streamed answer: its text, prompt tokens and cached ones. Raises PutOff."""
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        more = {"stream": True, "stream_options": {"include_usage": True}}
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body | more), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status == 429:
            raise PutOff
        if answer.status != 200:
            raise OSError(f"status {answer.status}: {answer.read(300)!r}")
        text, usage, reason = "", None, None
        for line in answer:
            if line.startswith(b"data: {"):
                piece = json.loads(line[6:])
                if "error" in piece:
                    raise OSError(str(piece["error"]))
                usage = piece.get("usage") or usage
                for choice in piece["choices"]:
                    text += choice["delta"].get("content") or ""
                    reason = choice["finish_reason"] or reason
        if reason is None or usage is None:
            raise OSError("the stream ended early")
        return text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    finally:
        connection.close()


@contextmanager
def serving(model: str, flags: Sequence[str]) -> Iterator[Served]:
    """A server in a process of its own."""
    command = [sys.executable, "-m", "pyspec", "server", model, "--port", "0", *flags]
    server = Served(command, wait_s=900)
    try:
        yield server
    finally:
        server.end()


def clients(chats: Chats, port: int, n: int, numbers: Iterator[int], until: float) -> Totals:
    """`n` conversations at a time, until no number is left or the time is over."""
    totals = Totals()

    def work() -> None:
        while time.monotonic() < until:
            with chats.lock:
                number = next(numbers, None)
            if number is None:
                return
            chats.run(port, number, totals)

    threads = [threading.Thread(target=work) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return totals


def value(port: int, name: str) -> float:
    """The sum of a figure of /metrics over its labels."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[ {{]", line))


def main() -> None:
    """Two runs of the same conversations, and what differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--chats", type=int, default=30)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between kills")
    ours, _, theirs = " ".join(sys.argv[1:]).partition(" -- ")
    args = parser.parse_args(ours.split())
    flags = ["-np", "3", *theirs.split()]
    chats = Chats(args.turns, args.tokens)
    with serving(args.model, flags) as server:
        one = clients(chats, server.port, args.clients, iter(range(args.chats)), float("inf"))
    print(
        f"one engine: {one.answers} answers, {100 * one.hits:.1f} % of prompt tokens cached", flush=True
    )
    until, n_kill, is_over = time.monotonic() + 60 * args.minutes, 0, threading.Event()
    with serving(args.model, [*flags, "--replicas", str(args.replicas)]) as server:
        port = server.port

        def kill() -> None:
            nonlocal n_kill
            while not is_over.wait(args.every):
                running = sorted(server.children("engine_main"))
                os.kill(running[n_kill % len(running)], signal.SIGKILL)
                n_kill += 1

        killer = threading.Thread(target=kill)
        killer.start()
        several, laps = Totals(), 0
        while time.monotonic() < until and not several.errors:
            # what an earlier lap left in the caches would be found again
            lap = clients(chats, port, args.clients, iter(range(args.chats)), until)
            several.answers += lap.answers
            several.errors += lap.errors
            several.n_put_off += lap.n_put_off
            if laps == 0:
                several.prompt_tokens, several.cached_tokens = lap.prompt_tokens, lap.cached_tokens
            laps += 1
        is_over.set()
        killer.join()
        moved = value(port, "pyspec_replica_requests_moved_total")
        failed = value(port, "pyspec_requests_failed_total")
    errors = one.errors + several.errors
    print(
        f"{args.replicas} replicas: {several.answers} answers in {laps} laps, {100 * several.hits:.1f} % cached in the first"
    )
    print(
        f"{n_kill} engines killed, {moved:.0f} requests moved, {failed:.0f} failed, {len(errors)} errors, "
        f"{several.n_put_off} answers with 429, after which a client waits a second",
        *errors[:9],
        sep="\n",
    )
    raise SystemExit(bool(errors) or failed > 0 or several.hits < SHARE * one.hits)


if __name__ == "__main__":
    main()
