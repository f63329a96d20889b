"""Read the resident memory of a process during a soak, as the system counts it. Nothing is collected or trimmed before a reading.

Checkpoints have budgets, and the engine counts them. Any other growth is a leak: objects in cycles, a heap that the C library keeps,
caches without a bound.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pyspec.engine.api import Engine
from pyspec.errors import PyspecError

MIB = 1 << 20
ENOUGH = 0.05  # share of the memory after the first minutes that may come to it later
LAST = 5  # readings at the end
SHORT = 0.25  # share that a run of minutes may grow by: threads still get arenas, caches fill, and readings differ by a tenth


def resident(pid: int) -> int:
    """Bytes of a process that are in memory."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"the system does not say what process {pid} has")


def accounted(engine: Engine) -> int:
    """Bytes of checkpoints."""
    m = engine.metrics()
    return m.states_device_bytes + m.states_host_bytes


@dataclass(frozen=True)
class Reading:
    """seconds since the traffic began, bytes in memory, and those of them that are checkpoints."""

    seconds: float
    resident: int
    accounted: int
    requests: int

    @property
    def beside(self) -> int:
        """Bytes that are not accounted."""
        return self.resident - self.accounted

    def __str__(self) -> str:
        return f"{self.seconds / 60:7.1f} {self.resident / MIB:9.0f} {self.accounted / MIB:10.0f} {self.requests:9d}"


@dataclass
class Watch:
    """Reads a process every so often on a thread of its own, prints a line for each reading, and judges them."""

    engine: Engine
    pid: int
    every_s: float
    warm_s: float  # of the beginning: growth in it does not count
    readings: list[Reading] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self, say: Callable[[str], None] = lambda line: print(line, flush=True)) -> None:
        """Until `stop`."""
        say("minutes       MiB  accounted  requests")
        began = time.monotonic()
        while not self._over.wait(self.every_s):
            self.read(time.monotonic() - began)
            say(str(self.readings[-1]))

    def read(self, seconds: float) -> None:
        try:
            m = self.engine.metrics()
            done = m.requests_done + m.requests_cancelled
            self.readings.append(Reading(seconds, resident(self.pid), accounted(self.engine), done))
        except (PyspecError, OSError):
            self._over.set()

    def stop(self) -> None:
        self._over.set()

    def flaw(self) -> str:
        """How much it has grown by since it was warm, if that is too much; "" if not.

        Two limits: what is not accounted may at no time be so much more, and at the end neither may all of it. Checkpoints alone may
        come and go within their budget.
        """
        warm = [r for r in self.readings if r.seconds >= self.warm_s]
        if len(warm) < 2:
            return ""
        first, end = warm[0], warm[1:][-LAST:]
        beside = max(r.beside for r in warm[1:]) - first.beside
        grown = sum(r.resident for r in end) // len(end) - first.resident
        for what, n in (("memory beside checkpoints", beside), ("memory", grown)):
            if n > ENOUGH * first.resident:
                share, after = n / first.resident, self.warm_s / 60
                return f"{what} grew by {n / MIB:.0f} MiB ({share:.1%}) from {first.resident / MIB:.0f} MiB after {after:.0f} minutes"
        return ""
