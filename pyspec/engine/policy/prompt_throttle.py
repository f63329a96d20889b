"""What long prompts may take of the time of slots that decode. Arithmetic only: no torch, and no clock but the rounds that it is told of.

A prompt's rows make a round longer, and everybody else waits for it. Of short prompts that is soon over. A long one rests behind each of its
pieces, until the slots that decode had their share: by default a long prompt takes as much time as each of them, so one beside eight
slows them by a ninth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from pyspec.slots.table import Slot

LONG = 8192  # tokens to be read from which on a prompt is long
NEWER = 0.25  # weight of the last round in what a round takes


class PromptReader(Protocol):
    """A request in a slot, as the loop's `Job` is one. n_prefill: tokens of its prompt; n_cached: of these, from the cache."""

    @property
    def n_prefill(self) -> int: ...

    @property
    def n_cached(self) -> int: ...

    @property
    def slot(self) -> Slot | None: ...

    @property
    def is_decoding(self) -> bool: ...


R = TypeVar("R", bound=PromptReader)


class Part(Protocol):
    """A request's part in a round, as the loop's `Work` is one."""

    @property
    def job(self) -> PromptReader: ...

    @property
    def is_prompt(self) -> bool: ...


class PromptThrottle:
    """weight: time that a long prompt may take, in that of a slot that decodes; 0: all that it can have.
    n_free: rows of it that are read at once all the same.

    owed  milliseconds that are due to the slots that decode before the next piece
    own   what such a round takes
    """

    def __init__(self, weight: float, n_free: int) -> None:
        self.weight, self.n_free = weight, n_free
        self.owed = self.own = 0.0
        self.n_resting = 0  # prompts that were left out when the last round was planned
        self._landed = 0.0
        self._follows = False  # somebody decoded in the round before, too: they waited for this one

    def awake(self, jobs: Iterable[R]) -> list[R]:
        """Those that have a part in this round."""
        jobs = list(jobs)
        if self.owed <= 0 or not any(job.is_decoding for job in jobs):
            self.owed = 0.0
            self.n_resting = 0
            return jobs
        found = [job for job in jobs if job.is_decoding or not self._is_long(job)]
        self.n_resting = len(jobs) - len(found)
        return found

    @property
    def are_over(self) -> bool:
        """Somebody rests, and has rested enough."""
        return self.n_resting > 0 and self.owed <= 0

    def _is_long(self, job: PromptReader) -> bool:
        if not self.weight or job.slot is None or job.n_prefill - job.n_cached <= LONG:
            return False
        return job.slot.n_past - job.n_cached >= self.n_free

    def landed(self, at: float, work: Sequence[Part]) -> None:
        """A round's results are there, at this time in seconds, and nothing of it is committed yet."""
        took, follows = 1e3 * (at - self._landed), self._follows
        n_prompt = sum(w.is_prompt for w in work)
        n_decoding = len(work) - n_prompt
        self._landed, self._follows = at, n_decoding > 0
        if not follows or not n_decoding:
            return
        n_long = sum(w.is_prompt and self._is_long(w.job) for w in work)
        if n_long:
            self.owed += max(0.0, took - self.own) * n_decoding / (self.weight * n_long) - self.own
        elif n_prompt:
            self.owed -= self.own
        else:
            self.own += (took - self.own) * (NEWER if self.own else 1.0)
            self.owed -= took
        self.owed = max(self.owed, -self.own)  # what was rested too long counts for the next time, a round of it
