"""Requests whose grammars take long to look at take turns: one of them a round, and then the others have as much time as that took.

A grammar whose rules meet can take a tenth of a second for one row's mask, and everybody in the round would wait for it, of eight such for all
of them. What a request is given does not depend on the round in which it is given it. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pyspec.constrain.constraint import SLOW_S
from pyspec.engine.loop.job import Job


class Turns:
    """clock: seconds, as the loop has them.

    n_slow  requests that take turns
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._slow: dict[str, None] = {}  # by id, who had its turn longest ago first
        self._due = 0.0  # when the next turn is
        self._known: dict[str, float] = {}  # by id, the seconds that its grammar had taken when it was looked at last

    @property
    def n_slow(self) -> int:
        return len(self._slow)

    def awake(self, jobs: Iterable[Job]) -> list[Job]:
        """Those that have a part in this round."""
        jobs = list(jobs)
        self._look(jobs)
        if not self._slow:
            return jobs
        rests = len(self._slow) < len(jobs) and self.clock() < self._due
        turn = "" if rests else next(iter(self._slow))
        return [job for job in jobs if job.id == turn or job.id not in self._slow]

    def _look(self, jobs: list[Job]) -> None:
        """Who was slow in the last round takes turns from now on; who was not in its own turn does not any more."""
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
