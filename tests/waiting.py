"""Waits of tests, clocks, and processes that they have started."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def wait_for(
    claim: Callable[[], object], seconds: float = 60.0, why: Callable[[], object] = str
) -> float:
    """Wait until `claim` holds; the seconds it took. Fails after `seconds`, which are for hangs, with the text of `why`."""
    began = time.monotonic()
    while not claim():
        assert time.monotonic() - began < seconds, f"it did not happen in time {why()}"
        time.sleep(0.005)
    return time.monotonic() - began


@dataclass
class Clock:
    """A clock that a test moves; it also goes on by `by` when it is read. Both are seconds."""

    now: float = 0.0
    by: float = 0.0

    def __call__(self) -> float:
        self.now += self.by
        return self.now


def lives(pid: int) -> bool:
    """Whether it runs; a process that ended but was not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(parent: int, name: str) -> list[int]:
    """Processes below one that run a module."""
    found, todo = [], [parent]
    while todo:
        pid = todo.pop()
        for task in Path(f"/proc/{pid}/task").glob("*"):
            try:
                below = [int(x) for x in (task / "children").read_text().split()]
                found += [p for p in below if name in Path(f"/proc/{p}/cmdline").read_text()]
            except OSError:  # it ended meanwhile
                continue
            todo += below
    return found
