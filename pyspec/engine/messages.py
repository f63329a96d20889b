"""Messages between supervisor and engine process: plain data over a pair of sockets, one write a message.

A round's events are one message. They come many times a second for every stream, so they travel as bare tuples, which pickle
many times faster than objects; everything else is rare. Both ends are processes of one program and inherit the sockets, so
unpickling reads only our own data.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from pyspec.config import EngineSettings
from pyspec.errors import PyspecError
from pyspec.request import (
    Delta,
    Done,
    EngineInfo,
    Event,
    Failed,
    Metrics,
    Progress,
    PromptLogprobs,
    Request,
    SlotInfo,
    Started,
    Timings,
    TokenLogprob,
)
from pyspec.slot_action import SlotAction, SlotAnswer
from pyspec.slots.blocks import BlockChange

_HEAD = struct.Struct("<I")
SEND_BYTES = 1 << 20  # bytes in transit: a busy parent must not stall a round


# -- to the engine -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """The first message. examined: run every kernel alone and wait for it, so that a failure names it."""

    path: Path
    settings: EngineSettings
    log_level: int
    examined: bool = False


@dataclass(frozen=True)
class Submit:
    """Queue a request. seed: drawn for a request without one, so that another engine draws the same."""

    name: str
    request: Request
    seed: int


@dataclass(frozen=True)
class Cancel:
    """End a request at the next round."""

    name: str


@dataclass(frozen=True)
class Question:
    """Asks for Reply: to "look" at the engine, to "park" or "wake" it, or to "act" on a slot. The engine reads and writes an action's file: a
    slot's content does not travel."""

    number: int
    what: Literal["look", "park", "wake", "act"]
    action: SlotAction | None = None


# -- from the engine ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogLine:
    """A record of the engine's log, for the parent's logger. fields: extra ones of a JSON line."""

    name: str
    level: int
    text: str
    created: float
    fields: dict[str, Any] | None = None


@dataclass(frozen=True)
class LoadStage:
    """Progress of the load: the stage, and its finished part."""

    stage: str
    fraction: float


@dataclass(frozen=True)
class Ready:
    """The engine is loaded and takes requests."""

    info: EngineInfo


@dataclass(frozen=True)
class LoadRefused:
    """The engine can not be loaded. kernels: modules of the running op, if this engine is examined."""

    error: PyspecError
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Events:
    """All events of a round, packed."""

    packed: Sequence[tuple[Any, ...]]


@dataclass(frozen=True)
class Blocks:
    """Changes of the prefix cache in a round, in order."""

    changes: Sequence[BlockChange]


@dataclass(frozen=True)
class Heartbeat:
    """Sent several times a second, also during a round.

    step_age  seconds of the current round so far; 0: none runs
    expected  seconds it may take, from the longest so far and its rows; 0: unknown
    metrics   sometimes: counters survive the process in its parent
    kernels   modules of the running op, if this engine is examined
    """

    step_age: float = 0.0
    expected: float = 0.0
    metrics: Metrics | None = None
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Looked:
    """The engine's state."""

    slots: Sequence[SlotInfo]
    metrics: Metrics


@dataclass(frozen=True)
class Reply:
    """To a question: Looked, the answer of an action, True for a park or a wake, or the error."""

    number: int
    answer: Looked | SlotAnswer | Literal[True]


@dataclass(frozen=True)
class Fatal:
    """The engine ends. kernels: modules of the op that failed, if it is known."""

    error: PyspecError
    kernels: tuple[str, ...] = ()


# -- events as tuples --------------------------------------------------------------------------------------------


def pack(event: Event) -> tuple[Any, ...]:
    """An event as a bare tuple: a letter of its kind, its request, its other fields."""
    letter, read, parts = _WAYS[type(event)]
    values = read(event)
    for i, bare, _ in parts:
        if values[i]:
            values = (*values[:i], bare(values[i]), *values[i + 1 :])
    return letter, *values


def unpack(packed: tuple[Any, ...]) -> Event:
    """The event of a tuple from `pack`."""
    kind = _KINDS[packed[0]]
    for i, _, made in _WAYS[kind][2]:
        if packed[i + 1]:
            packed = (*packed[: i + 1], made(packed[i + 1]), *packed[i + 2 :])
    return kind(*packed[1:])


def portable(error: PyspecError) -> PyspecError:
    """The error, or a PyspecError with its text if it can not be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an error class of another package, for example
        return PyspecError(str(error))
    return error


_TIMINGS = tuple(field.name for field in fields(Timings))
_ENTRIES = (
    lambda entries: [(p.token, p.logprob, p.top) for p in entries],
    lambda entries: tuple(TokenLogprob(*entry) for entry in entries),
)
_PARTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "timings": (
        attrgetter(*_TIMINGS),
        lambda values: Timings(**dict(zip(_TIMINGS, values, strict=True))),
    ),
    "logprobs": _ENTRIES,
    "entries": _ENTRIES,
    "error": (portable, lambda error: error),
}
"""Fields of events that are objects: how they become bare, and come back."""
_KINDS: dict[str, Any] = {
    "s": Started, "p": Progress, "l": PromptLogprobs, "d": Delta, "e": Done, "f": Failed
}  # fmt: skip
_WAYS: dict[type[Event], Any] = {}
"""For each kind: its letter, the reader of its fields, and the places of those objects."""
for _letter, _kind in _KINDS.items():
    _names = tuple(field.name for field in fields(_kind))
    _parts = tuple((i, *_PARTS[name]) for i, name in enumerate(_names) if name in _PARTS)
    _WAYS[_kind] = _letter, attrgetter(*_names), _parts


# -- between the first rank and the others ------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadShare:
    """The first message to a rank: the share to load, and the file through which all ranks meet.

    n_page, width   of the slots' memory (Description); dense: the dtype of unpacked matrices, or "" for packed ones
    n_bytes         planned memory; n_attention: of that, for partial sums of attention
    n_arena_page    of one sequence in a graph; 0: no graphs
    """

    path: Path
    settings: EngineSettings
    index: int
    device: str
    store: str
    n_page: int
    width: int
    dense: str
    wide: bool
    n_bytes: int
    n_attention: int
    n_arena_page: int
    log_level: int


@dataclass(frozen=True)
class ShareState:
    """A rank's progress: "joins" before it meets the others, "loaded", then "alive" several times a second.

    waits  as of `Calls.waits`
    """

    state: str
    waits: tuple[float, str] = (0.0, "before its first call")


@dataclass(frozen=True)
class ShareFailed:
    """The rank ends itself."""

    error: PyspecError


# -- the pipe ----------------------------------------------------------------------------------------------------


class Link:
    """One end of a link. Call `send` on any thread, `receive` on one. A message is read whole or not at all."""

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        self._end = end
        self._in = end.makefile("rb", buffering=1 << 16)
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        """Send a message. Raises OSError if the other side is gone."""
        body = pickle.dumps(message, protocol=5)
        with self._lock:
            self._end.sendall(_HEAD.pack(len(body)) + body)

    def receive(self) -> Any:
        """The next message; None if the other side is gone."""
        try:
            head = self._in.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return None
            (n,) = _HEAD.unpack(head)
            body = self._in.read(n)
        except (OSError, ValueError):
            return None
        return pickle.loads(body) if len(body) == n else None

    def close(self) -> None:
        """Close the link; both sides then read its end. Safe while another thread is in `receive`."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()  # the file in `receive` keeps the descriptor until it has read the end
