"""The interfaces of an engine, as its server and `Engine` know it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pyspec.request import EngineInfo, Event, Metrics, ReplicaInfo, Request, SlotInfo
from pyspec.slot_action import SlotAction, SlotAnswer

Sink = Callable[[Event], None]
"""Takes the events of one request, in order. Called on the engine's thread; returns at once."""


class RunsRequests(Protocol):
    """The face of an engine, for its server and for `Engine`. Every method may be called from any thread."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: Request, sink: Sink) -> str:
        """Queue a request and return its name. Raises RequestError, QueueFull or Unavailable at once.

        `sink` then gets Started, Progress and Delta events and, last, exactly one Done or Failed. The first event may
        arrive before this method returns.
        """
        ...

    def cancel(self, name: str) -> None:
        """End a request at the next round; its Done says "cancelled". Unknown and finished ones are ignored."""
        ...

    def act_on_slot(self, action: SlotAction, on_answer: Callable[[SlotAnswer], None]) -> None:
        """Save, restore or erase a slot's content once it is idle. `on_answer` gets the result once, on any thread, and must not block."""
        ...

    def slots(self) -> list[SlotInfo]:
        """One row per slot."""
        ...

    def metrics(self) -> Metrics:
        """Counters since the start, and gauges."""
        ...

    def replicas(self, *, counts: bool = True) -> list[ReplicaInfo]:
        """One row per engine, if there are several; else none. counts: with metrics, which an engine may take a second to tell."""
        ...

    def alive(self) -> bool:
        """True if requests are taken: not while loading, nor after the engine has stopped for good."""
        ...

    def state(self) -> str:
        """ "loading", "ok", "recovering" while a failed engine is replaced and requests wait, or "stopped"."""
        ...


class Core(RunsRequests, Protocol):
    """Runs validated requests: core.EngineCore in this process, supervisor.Supervisor with a core in another one, replicas.Replicas with
    several."""

    def park(self) -> None:
        """Keep the weights and the prefix cache in host memory and give up the rest, and the device: no request runs, and none is taken until
        `wake`. Takes seconds. Raises NotSupported, Unavailable, DeviceError."""
        ...

    def wake(self) -> None:
        """Undo `park`. Raises DoesNotFit if others have taken the memory meanwhile: it stays parked. Raises DeviceError, Unavailable."""
        ...

    def in_listener(self) -> bool:
        """True on a thread that calls listeners: a call that waits there would wait for itself."""
        ...

    def close(self, limit_s: float = ...) -> bool:
        """Stop; running requests fail with Unavailable. Returns False if something did not end within `limit_s`."""
        ...
