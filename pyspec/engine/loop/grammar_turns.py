"""Turns for requests with slow grammars: one of them runs per round, and then the others get as much time as that took.

A grammar with meeting rules can take a tenth of a second for one row's mask, and every request of the round would wait for it.
A request's text does not depend on the round that computes it. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pyspec.constrain.constraint import SLOW_S
from pyspec.engine.loop.job import Job


class Turns:
    """clock: seconds, the loop's.

    n_slow  requests that take turns
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._slow: dict[str, None] = {}  # by id, the longest wait first
        self._due = 0.0  # when the next turn is
        self._known: dict[
            str, float
        ] = {}  # by id, the seconds that its grammar had taken at the last look

    @property
    def n_slow(self) -> int:
        return len(self._slow)

    def awake(self, jobs: Iterable[Job]) -> list[Job]:
        """Jobs that take part in this round."""
        jobs = list(jobs)
        self._look(jobs)
        if not self._slow:
            return jobs
        pauses = len(self._slow) < len(jobs) and self.clock() < self._due
        turn = "" if pauses else next(iter(self._slow))
        return [job for job in jobs if job.id == turn or job.id not in self._slow]

    def _look(self, jobs: list[Job]) -> None:
        """Put a request that was slow in the last round on turns; release one that was fast in its own turn."""
        held = {job.id: job.constraint.spent for job in jobs if job.constraint is not None}
        for name, spent in held.items():
            took = spent - self._known.get(name, spent)
            if took > 0:
                self._slow.pop(name, None)
            if took >= SLOW_S:
                self._slow[name] = None
                self._due = self.clock() + took
        self._known = held
        for name in self._slow.keys() - held.keys():
            del self._slow[name]
