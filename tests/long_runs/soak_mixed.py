"""Traffic of all kinds for the soak: conversations, grammars, samplers, slots that are saved and restored; by Python and over HTTP."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from pyspec.engine.api import Engine
from pyspec.errors import PyspecError

WORDS = [
    "the",
    "of",
    "and",
    "memory",
    "slot",
    "cache",
    "draft",
    "token",
    "python",
    "bird",
    "river",
    "stone",
    "cloud",
    "paper",
    "light",
    "seven",
    "quick",
    "slow",
    "blue",
]
ENDS = ("eos", "stop", "length")


@dataclass
class Tally:
    """The events of all threads."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1

    def fail(self, what: str) -> None:
        with self.lock:
            self.wrong.append(what)


@dataclass(frozen=True)
class Seat:
    """One client's things: the engine, a connection to its server, a folder for slots' files, its dice."""

    engine: Engine
    client: httpx.Client
    folder: Path
    rng: random.Random
    tally: Tally


def said(rng: random.Random, most: int = 40) -> str:
    """A user's text."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(3, most)))


def schema(rng: random.Random) -> dict[str, object]:
    """One of a few that come again and again, or a new one."""
    name = rng.choice(WORDS[:4]) if rng.random() < 0.5 else f"field_{rng.randrange(10**9)}"
    of = {"type": "string", "maxLength": 12} if rng.random() < 0.5 else {"type": "integer"}
    return {"type": "object", "properties": {name: of}, "required": [name]}


def conversation(seat: Seat) -> None:
    """A chat of a few turns. Each begins with the whole chat so far, and often with the beginning of other chats."""
    rng, messages = seat.rng, list[dict[str, str]]()
    if rng.random() < 0.5:
        messages.append(
            {"role": "system", "content": f"You are helper {rng.randrange(3)}. " + " ".join(WORDS * 4)}
        )
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": said(rng)})
        result = seat.engine.chat(
            messages, max_tokens=20, temperature=rng.choice((0.0, 0.0, 0.9)), seed=rng.randrange(99)
        )
        if result.finish not in ENDS:
            seat.tally.fail(f"a chat ended with {result.finish}")
        messages.append({"role": "assistant", "content": result.text})
        seat.tally.add("turns")


def left(seat: Seat) -> None:
    """A stream that is left after a few words."""
    stream, stay = seat.engine.stream(said(seat.rng), max_tokens=200), seat.rng.randint(0, 6)
    for n_read, _ in enumerate(stream):
        if n_read >= stay:
            break
    stream.close()
    seat.tally.add("left")


def held(seat: Seat) -> None:
    """A text that is held to a schema, to GBNF or to choices."""
    rng = seat.rng
    options: dict[str, object] = {"max_tokens": 60, "temperature": rng.choice((0.0, 1.0))}
    kind = rng.randrange(3)
    if kind == 0:
        options["json_schema"] = schema(rng)
    elif kind == 1:
        options["grammar"] = f'root ::= "{rng.choice(WORDS)} {rng.randrange(10**6)}" [a-z]*'
    else:
        options["choices"] = rng.sample(WORDS, 3)
    result = seat.engine.generate(said(rng), **options)  # type: ignore[arg-type]
    if kind == 0 and result.finish != "length":
        json.loads(result.text)
    if kind == 2 and result.finish != "length" and result.text not in WORDS:
        seat.tally.fail(f"{result.text!r} is none of the choices")
    seat.tally.add("held to grammars")


def slots(seat: Seat) -> None:
    """Save a slot's content to a file, restore it into another slot, or erase it."""
    rng, n = seat.rng, seat.engine.info.n_slot
    path = seat.folder / f"slot-{rng.randrange(6)}"
    what = rng.randrange(3)
    if what == 0:
        seat.engine.save_slot(rng.randrange(n), path)
    elif what == 1 and path.exists():
        seat.engine.restore_slot(rng.randrange(n), path)
    else:
        seat.engine.erase_slot(rng.randrange(n))
    seat.tally.add("slots saved, restored, erased")


def over_http(seat: Seat) -> None:
    """A chat completion, whole or streamed, with or without a schema; some are left."""
    rng = seat.rng
    body: dict[str, object] = {
        "model": "demo",
        "messages": [{"role": "user", "content": said(rng)}],
        "max_tokens": rng.choice((5, 20, 40)),
        "temperature": rng.choice((0.0, 0.8)),
        "stream": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(rng)}}  # fmt: skip
    leaves = rng.random() < 0.2
    with seat.client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            seat.tally.fail(f"status {response.status_code}: {response.read()[:200]!r}")
            return
        for _ in response.iter_lines():
            if leaves:
                seat.tally.add("disconnected")
                return
    seat.tally.add("chats over HTTP")


def looked(seat: Seat) -> None:
    """Ask for a dashboard's pages."""
    for path in ("/slots", "/metrics", "/health", "/props"):
        if seat.client.get(path).status_code not in (200, 501):
            seat.tally.fail(f"{path} is not there")
    seat.tally.add("looked at")


KINDS: tuple[tuple[Callable[[Seat], None], int], ...] = (
    (conversation, 6), (left, 2), (held, 3), (slots, 1), (over_http, 5), (looked, 1),
)  # fmt: skip


def mixed(seat: Seat) -> None:
    """Run traffic of a random kind and report failures."""
    kinds, weights = zip(*KINDS, strict=True)
    (kind,) = seat.rng.choices(kinds, weights)
    try:
        kind(seat)
    except (PyspecError, httpx.HTTPError, ValueError) as e:
        seat.tally.fail(f"{kind.__name__}: {type(e).__name__}: {e}")
