"""Repeated lines of a log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class RateLimit(logging.Filter):
    """Limits how often lines are logged that are equal except for their numbers, because a client that can cause many per second must not
    fill a disk. The next line reports how many were left out."""

    def __init__(
        self, most: int = 20, window_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self.most, self.window_s, self.clock = most, window_s, clock
        self._seen: dict[
            tuple[str, str], list[float]
        ] = {}  # [start of the window, lines, lines left out]

    def filter(self, record: logging.LogRecord) -> bool:
        if len(self._seen) > 1000:
            self._seen.clear()
        key, now = (record.name, str(record.msg)[:200]), self.clock()
        seen = self._seen.setdefault(key, [now, 0, 0])
        if now - seen[0] > self.window_s:
            if seen[2]:
                record.msg, record.args = f"{record.getMessage()} (and {int(seen[2])} more like it)", ()
            seen[:] = [now, 0, 0]
        seen[1] += 1
        seen[2] += seen[1] > self.most
        return seen[1] <= self.most or record.levelno < logging.WARNING


def limited(name: str) -> logging.Logger:
    """The logger of a module whose lines a client can cause many times per second, limited for all of its handlers."""
    log = logging.getLogger(name)
    log.addFilter(RateLimit())
    return log
