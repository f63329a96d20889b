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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
_KINDS = {Started: "s", Progress: "p", Delta: "d", Done: "e", Failed: "f"}
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
class Look:
    """Asks for Looked."""

    number: int


@dataclass(frozen=True)
class ActOnSlot:
    """Asks for SlotActed. The engine reads and writes the file: a slot's content does not travel."""

    number: int
    action: SlotAction


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
    """The answer to Look."""

    number: int
    slots: Sequence[SlotInfo]
    metrics: Metrics


@dataclass(frozen=True)
class SlotActed:
    """The answer to ActOnSlot."""

    number: int
    answer: SlotAnswer


@dataclass(frozen=True)
class Fatal:
    """The engine ends. kernels: modules of the op that failed, if it is known."""

    error: PyspecError
    kernels: tuple[str, ...] = ()


# -- events as tuples --------------------------------------------------------------------------------------------


def pack(event: Event) -> tuple[Any, ...]:
    """An event as a bare tuple, its kind first."""
    if isinstance(event, Delta):
        logprobs = [(p.token, p.logprob, p.top) for p in event.logprobs] or None
        timings = None if event.timings is None else _fields(event.timings)
        return (
            "d",
            event.request,
            event.tokens,
            event.text,
            logprobs,
            event.n_draft,
            event.n_accepted,
            timings,
        )
    if isinstance(event, Done):
        e = event
        timings = _fields(e.timings)
        return (
            "e",
            e.request,
            e.finish,
            e.n_prompt,
            e.n_predicted,
            timings,
            e.stop_string,
            e.truncated,
            e.slot,
            e.n_in_stop,
        )
    if isinstance(event, Failed):
        return "f", event.request, portable(event.error)
    if isinstance(event, Started):
        return "s", event.request, event.slot, event.n_prompt, event.n_cached
    if isinstance(event, PromptLogprobs):
        return (
            "l",
            event.request,
            event.first,
            [(p.token, p.logprob, p.top) for p in event.entries],
            event.ranks,
        )
    return "p", event.request, event.n_prompt, event.n_cached, event.n_processed, event.ms


def unpack(packed: tuple[Any, ...]) -> Event:
    """The event of a tuple from `pack`."""
    kind, *values = packed
    if kind == "d":
        request, tokens, text, logprobs, n_draft, n_accepted, timings = values
        entries = () if logprobs is None else tuple(TokenLogprob(*entry) for entry in logprobs)
        return Delta(request, tokens, text, entries, n_draft, n_accepted, timings and _timings(timings))
    if kind == "l":
        request, first, entries, ranks = values
        return PromptLogprobs(request, first, tuple(TokenLogprob(*entry) for entry in entries), ranks)
    if kind == "e":
        request, finish, n_prompt, n_predicted, timings, *rest = values
        return Done(request, finish, n_prompt, n_predicted, _timings(timings), *rest)
    return {"f": Failed, "s": Started, "p": Progress}[kind](*values)


_TIMINGS = tuple(Timings.__dataclass_fields__)


def _fields(timings: Timings) -> tuple[Any, ...]:
    return tuple([getattr(timings, name) for name in _TIMINGS])


def _timings(values: tuple[Any, ...]) -> Timings:
    return Timings(**dict(zip(_TIMINGS, values, strict=True)))


def portable(error: PyspecError) -> PyspecError:
    """The error, or a PyspecError with its text if it can not be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an error class of another package, for example
        return PyspecError(str(error))
    return error


# -- between the first rank and the others ------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadShare:
    """The first message to a rank: the share to load, and the file through which all ranks meet.

    n_page, width   of the slots' memory (Description); dense: the dtype of unpacked matrices, or "" for packed ones
    n_bytes         planned memory; n_attention: of that, for partial sums of attention
    n_arena_page    of one sequence in a graph; 0: no graphs
    divides_draft   ranks divide the drafter, too
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
    divides_draft: bool = False


@dataclass(frozen=True)
class ShareState:
    """A rank's progress: "joins" before it meets the others, "loaded", then "alive" several times a second."""

    state: str


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
