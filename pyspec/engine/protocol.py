"""The interface of an engine that `Engine` uses: a thread of this process, or another process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pyspec.request import EngineInfo, Event, Metrics, ReplicaInfo, Request, SlotInfo
from pyspec.slot_action import SlotAction, SlotAnswer


class Core(Protocol):
    """Runs requests: core.EngineCore in this process, supervisor.Supervisor with a core in another one, replicas.Replicas with several."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: Request, sink: Callable[[Event], None]) -> str:
        """Queue a validated request; `sink` gets its events. Returns its name."""
        ...

    def cancel(self, name: str) -> None:
        """End a request at the next round; unknown names are ignored."""
        ...

    def act_on_slot(self, action: SlotAction, on_answer: Callable[[SlotAnswer], None]) -> None:
        """Save, restore or erase a slot's content. `on_answer` gets the result once, on any thread, and must not block."""
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

    def in_listener(self) -> bool:
        """True on a thread that calls listeners: a call that waits there would wait for itself."""
        ...

    def alive(self) -> bool:
        """True if requests are taken."""
        ...

    def state(self) -> str:
        """ "loading", "ok", "recovering" or "stopped"."""
        ...

    def close(self, limit_s: float = ...) -> bool:
        """Stop; running requests fail with Unavailable. Returns False if something did not end within `limit_s`."""
        ...
