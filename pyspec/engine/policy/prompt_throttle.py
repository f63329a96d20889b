"""Limits the time that long prompts take from decoding slots. Arithmetic only: no torch, and no clock of its own.

A prompt's rows make a round longer for every slot. A short prompt is over soon. A long one pauses after each of its chunks until
the decoding slots have had their share. By default a long prompt takes as much time as each decoding slot, so one beside eight
slows them by a ninth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from pyspec.engine.policy.prompt_pace import PAUSE_MS, PacedRequest

LONG = 8192  # uncached tokens of a long prompt
N_CHUNK = 5  # chunks whose lower quartile says how long one takes: pauses of the machine come in a row
PAUSE = 2.0  # factor of that beyond which a chunk's time is a pause of the machine, for which no prompt waits
NEWER = 0.25  # weight of the last round in the mean time of a round


R = TypeVar("R", bound=PacedRequest)


class RoundPart(Protocol):
    """A request's part in a round, such as the loop's `Work`."""

    @property
    def job(self) -> PacedRequest: ...

    @property
    def is_prompt(self) -> bool: ...


class PromptThrottle:
    """weight: time of a long prompt in units of a decoding slot's; 0: no limit. n_free: rows of it that are never delayed.

    owed  milliseconds due to the decoding slots before the next chunk: at most what `PAUSE` usual chunks take from those that decode now
    own   milliseconds of a round of theirs
    """

    def __init__(self, weight: float, n_free: int) -> None:
        self.weight, self.n_free = weight, n_free
        self.owed = self.own = 0.0
        self.n_resting = 0  # prompts left out of the last plan
        self._landed = 0.0
        self._chunks: deque[float] = deque(maxlen=N_CHUNK)  # milliseconds of each beyond `own`
        self._follows = False  # the round before had decoding slots, too, so they waited for this one

    def awake(self, jobs: Iterable[R]) -> list[R]:
        """Jobs that take part in this round."""
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
        """A paused prompt may run again."""
        return self.n_resting > 0 and self.owed <= 0

    def _is_long(self, job: PacedRequest) -> bool:
        if not self.weight or job.slot is None or job.n_prefill - job.n_cached <= LONG:
            return False
        return job.slot.n_past - job.n_cached >= self.n_free

    def landed(self, at: float, work: Sequence[RoundPart], *, rested: bool = False) -> None:
        """A round's results arrived at this time, in seconds. Call it before they are committed. rested: decoding slots had no part in it."""
        took, follows = 1e3 * (at - self._landed), self._follows
        n_prompt = sum(w.is_prompt for w in work)
        n_decoding = len(work) - n_prompt
        self._landed, self._follows = at, n_decoding > 0 or (rested and follows)
        if not follows or not n_decoding:
            return
        n_long = sum(w.is_prompt and self._is_long(w.job) for w in work)
        if n_long:
            self._chunks.append(max(0.0, took - self.own))
            chunk = min(self._chunks[-1], self._usual)
            self.owed += chunk * n_decoding / (self.weight * n_long) - self.own
        elif n_prompt:
            self.owed -= self.own
        else:
            self.own += (took - self.own) * (NEWER if self.own else 1.0)
            self.owed -= took
        # credit for a rest that was too long, up to one round
        most = self._usual * n_decoding / self.weight if self.weight else 0.0
        self.owed = max(min(self.owed, most), -self.own)

    @property
    def _usual(self) -> float:
        """Most milliseconds that a chunk counts: of the first one, what the pace lets a forward take."""
        if len(self._chunks) < 2:
            return PAUSE_MS
        return PAUSE * sorted(self._chunks)[len(self._chunks) // 4]
