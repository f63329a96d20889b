"""What runs requests, as `Engine` knows it: a thread of this process, or a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pyspec.request import EngineInfo, Event, Metrics, Request, SlotAction, SlotAnswer, SlotInfo


class Core(Protocol):
    """What runs requests: core.EngineCore in this process, supervisor.Supervisor with one in a process of its own."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: Request, sink: Callable[[Event], None]) -> str:
        """Queue a request that has been checked; `sink` gets its events. Returns its name."""
        ...

    def cancel(self, name: str) -> None:
        """End a request at the next round; a name that is not known is ignored."""
        ...

    def act_on_slot(self, action: SlotAction, on_answer: Callable[[SlotAnswer], None]) -> None:
        """Save, restore or erase what a slot holds. `on_answer` gets what came of it, once, on any thread, and must not block."""
        ...

    def slots(self) -> list[SlotInfo]:
        """What each slot is at."""
        ...

    def metrics(self) -> Metrics:
        """Counters since the start, and gauges."""
        ...

    def in_listener(self) -> bool:
        """Whether this is a thread on which listeners are told: one that waits here waits for itself."""
        ...

    def alive(self) -> bool:
        """Whether requests are taken."""
        ...

    def state(self) -> str:
        """ "loading", "ok", "recovering" or "stopped"."""
        ...

    def close(self, limit_s: float = ...) -> bool:
        """Stop; running requests fail with Unavailable. False: something would not end within `limit_s`."""
        ...
