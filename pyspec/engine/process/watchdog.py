"""Whether an engine process is still at work: what may take how long, and how it ended if it is not."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pyspec.engine.messages import Heartbeat
from pyspec.engine.process.process import EngineProcess

STOPPED_S = 2.0  # silence of a process that somebody stopped
HANG_FACTOR = 10.0  # a round hangs when it has taken so many times what it should, by those before it,
HANG_S = {"cpu": (60.0, 600.0), "gpu": (5.0, 60.0)}  # but so many seconds at least; and while there was none to go by
SILENT_S = 120.0  # without any word between rounds
WINDOW_S = 600.0  # so long a false alarm makes more patient
TICK_S = 0.05  # how often it is asked
LATE_S = 1.0  # whoever asks so late did not run, and can say nothing about others


@dataclass(frozen=True)
class EngineEnd:
    """Why an engine process is not used any more. An empty `why`: by itself, and its exit status tells."""

    why: str
    from_outside: bool = False  # somebody killed or stopped it
    kernels: tuple[str, ...] = ()  # modules of the op that failed
    of_device: bool = False


class Watchdog:
    """Looks at one engine process after another. Who was wrong about a round that hangs is more patient with the next."""

    def __init__(self, hang_timeout: float) -> None:
        self._hang_timeout = hang_timeout
        self._alarms: list[float] = []
        self._asked = time.monotonic()

    def look(self, child: EngineProcess, device: str) -> EngineEnd | None:
        """None: it is at work, or may be."""
        now = time.monotonic()
        if now - self._asked > LATE_S:  # a machine that slept, say
            child.forgive(now)
        self._asked = now
        silent = now - child.received
        if silent > STOPPED_S and child.is_stopped:
            return EngineEnd(f"its process has been stopped for {silent:.1f} s", from_outside=True)
        beat, at = child.beat or (Heartbeat(), child.received)
        if not beat.step_age:
            return EngineEnd(f"it has said nothing for {silent:.0f} s") if silent > SILENT_S else None
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
