"""Decides whether an engine process still works: how long a round may take, by the rounds before it, and the reason if it does not."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pyspec.engine.messages import Heartbeat
from pyspec.engine.process.process import EngineProcess

STOPPED_S = 2.0  # silence of a process that was stopped by a signal
HANG_FACTOR = 10.0  # a round hangs after this many times its expected duration
# and after at least this many seconds, with and without an expectation
HANG_S = {"cpu": (60.0, 600.0), "gpu": (5.0, 60.0)}
SILENT_S = 120.0  # seconds without a message between rounds
WINDOW_S = 600.0  # seconds for which a false alarm raises the limits
TICK_S = 0.05  # interval of the checks
LATE_S = 1.0  # a check that comes this late shows that this process did not run


class RoundPace:
    """Expected duration of a round, which heartbeats tell the watchdog: the longest so far, scaled up if the round has more rows than any
    before."""

    def __init__(self) -> None:
        self.longest, self.most_rows, self._rows = 0.0, 0, 1

    def begin(self, n_row: int) -> None:
        """A round of `n_row` rows starts."""
        self._rows = n_row

    def end(self, seconds: float) -> None:
        """The round took this long."""
        self.longest, self.most_rows = max(self.longest, seconds), max(self.most_rows, self._rows)

    @property
    def expected(self) -> float:
        """Seconds of the current round; 0: unknown."""
        return self.longest * max(1.0, self._rows / self.most_rows) if self.most_rows else 0.0


@dataclass(frozen=True)
class EngineEnd:
    """Why an engine process is not used any more. An empty `why`: its exit status says it."""

    why: str
    from_outside: bool = False  # a signal from outside killed or stopped it
    kernels: tuple[str, ...] = ()  # modules of the op that failed
    of_device: bool = False


class Watchdog:
    """Watches one engine process after another. After a false alarm it waits longer for the next round."""

    def __init__(self, hang_timeout: float) -> None:
        self._hang_timeout = hang_timeout
        self._alarms: list[float] = []
        self._asked = time.monotonic()

    def look(self, child: EngineProcess, device: str) -> EngineEnd | None:
        """Returns why the process is given up; None while it works, or may work."""
        now = time.monotonic()
        if now - self._asked > LATE_S:  # the machine slept, for example
            child.forgive(now)
        self._asked = now
        silent = now - child.received
        if silent > STOPPED_S and child.is_stopped:
            return EngineEnd(f"its process has been stopped for {silent:.1f} s", from_outside=True)
        beat, at = child.beat or (Heartbeat(), child.received)
        if not beat.step_age:
            return EngineEnd(f"it has been silent for {silent:.0f} s") if silent > SILENT_S else None
        age, limit = beat.step_age + now - at, self._limit(beat, device)
        if age <= limit:
            return None
        self._alarms.append(now)
        why = f"a round has been under way for {age:.1f} s, more than {limit:.1f}"
        return EngineEnd(why, kernels=beat.kernels, of_device=True)

    def _limit(self, beat: Heartbeat, device: str) -> float:
        """Seconds a round may take."""
        if self._hang_timeout:
            return self._hang_timeout
        least, unknown = HANG_S["cpu" if device.startswith("cpu") else "gpu"]
        limit = max(least, HANG_FACTOR * beat.expected) if beat.expected else unknown
        return limit * 2.0 ** sum(time.monotonic() - at < WINDOW_S for at in self._alarms)
