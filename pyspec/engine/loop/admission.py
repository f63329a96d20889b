"""Who sits where: waiting requests get their slots, with what the prefix cache has of their prompts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from torch import Tensor

from pyspec.device.worker import Worker, is_device_error
from pyspec.engine.loop.job import Job, blamed
from pyspec.engine.loop.speculator import Speculator
from pyspec.engine.loop.stats import Stats
from pyspec.engine.policy.evict import SHORT
from pyspec.engine.policy.queue import ANSWER, Queue, cuts_of, worth_on
from pyspec.repeats import limited
from pyspec.request import Failed, Started
from pyspec.slots.cache import PrefixCache
from pyspec.slots.prefix import NO_HIT, Hit
from pyspec.slots.table import Slot

log = limited(__name__)

MOST_SUSPENDED = 8  # times that a request makes room
PATIENCE_S = 5.0
"""How long a short request waits before it has the slot of one that was given more than it asks for. Each makes one other wait, once, so what
this costs is bounded by the number of requests."""


class Admission:
    """Seats who waits. `jobs`: those that sit, by slot, in order of arrival."""

    def __init__(
        self,
        queue: Queue[Job],
        jobs: dict[int, Job],
        worker: Worker,
        speculator: Speculator,
        cache: PrefixCache,
        stats: Stats,
    ) -> None:
        self.queue, self.jobs, self.worker, self.speculator = queue, jobs, worker, speculator
        self.cache, self.stats, self.table = cache, stats, worker.table
        self.synthetic = False  # acceptance is made up
        self.clock: Callable[[], float] = time.perf_counter  # as the jobs' own
        self.ready: list[tuple[Job, Tensor]] = []  # seated with all of their prompt, and its last token's logits

    def update(self) -> None:
        """Drop who was cancelled while it waited, and seat who can be."""
        for gone in [job for job in self.queue.waiting() if job.cancelled]:
            self.queue.remove(gone)
            gone.done("cancelled")
        while (job := self.queue.next(self.table)) is not None:
            self._seat(job)

    def _seat(self, job: Job) -> None:
        """Give a request its slot, with what is filed of its prompt. If that fails it is told so, and nobody else."""
        slot = self.table.pick(job.request.slot)
        assert slot is not None, "the queue offered a job without an idle slot"
        try:
            self._begin(job, slot)
        except Exception as e:
            if is_device_error(e):
                raise
            log.exception("request %s could not be seated", job.id)
            if slot.busy:
                self.table.release(slot, trusted=False)
            self.stats.failed += 1
            job.sink(Failed(job.id, blamed(e)))

    def _begin(self, job: Job, slot: Slot) -> None:
        request, size, cache = job.request, self.table.page_size, self.cache
        hit = cache.find(job.prefill) if job.reuses else NO_HIT
        saved = cache.seat(slot, job.n_rows, job.prefill, hit, self.worker.pools())
        self.speculator.begin(
            slot,
            saved.draft if saved is not None else None,
            grammar="" if request.grammar is None else request.grammar.source,
        )
        files = cache.on and request.cache_prompt and self.worker.memory.needs_state
        places = {hit.n_match, request.n_before_turn, request.n_system}
        n_stable, worth = request.n_stable or job.n_prefill, worth_on(self.worker.device.type)
        cuts = cuts_of(n_stable, size, hit.n, places, cache.every, worth) if files else ()
        job.begin(slot, cuts)
        if (hit.other or hit.n < hit.n_match) and not job.goes_on:
            job.cache_break_at = hit.n_match
            if log.isEnabledFor(logging.DEBUG):
                self._log_break(job, hit)
        job.synthetic = self.synthetic
        self.jobs[slot.index] = job
        if saved is not None and saved.logits is not None and slot.n_past == job.n_prefill:
            self.ready.append((job, saved.logits.to(self.worker.device)))
        if not job.n_suspended:
            job.sink(Started(job.id, slot.index, job.n_prompt, job.n_cached))

    def in_the_way(self) -> Job | None:
        """Who makes room for a short request that waits and finds no slot: one whose long prompt is being read, else one that has had
        its turn. None if there is none."""
        short = self._short()
        if short is None:
            return None
        least = 2 * short.cost + SHORT
        found = [job for job in self._movable() if not job.is_decoding and job.todo[0] > least]
        return max(found, key=lambda job: job.todo[0], default=None) or self._had_its_turn(short)

    @property
    def is_turn_over(self) -> bool:
        """Somebody who decodes makes room with the next round."""
        short = self._short()
        return short is not None and self._had_its_turn(short) is not None

    def _short(self) -> Job | None:
        """The first in line where all slots are taken, if it is short and has had none yet."""
        if not len(self.queue) or not all(slot.busy for slot in self.table.slots) or not self.cache.on:
            return None
        short = next((job for job in self.queue.waiting() if job.wanted_slot < 0), None)
        return None if short is None or short.cost > SHORT or short.n_suspended else short

    def _had_its_turn(self, short: Job) -> Job | None:
        """Who was given most since it was seated, if that is more than `short` asks for, which has waited for long (least attained service
        first). So no text holds a slot for as long as it likes, whether it is read by its client or not."""
        if self.clock() - short.started < PATIENCE_S:
            return None
        asked = short.cost + min(short.n_left, ANSWER)
        found = [job for job in self._movable() if job.is_decoding and job.n_given > asked]
        return max(found, key=lambda job: job.n_given, default=None)

    def _movable(self) -> list[Job]:
        """Those that can go on from the cache, in any slot, without a word of theirs being another."""
        return [job for job in self.jobs.values() if self._may_wait(job)]

    def _may_wait(self, job: Job) -> bool:
        may = job.reuses and job.n_suspended < MOST_SUSPENDED and not job.cancelled
        if job.is_decoding:  # time is part of what it asked for, or the slot is
            may = may and job.request.max_predict_ms <= 0 and job.wanted_slot < 0
        return may and job.slot is not None and job.slot.index not in self.speculator.lost_track

    def _log_break(self, job: Job, hit: Hit) -> None:
        """What the request's text and the cache have in common, and how each goes on."""
        decode, at = job.stream.tokenizer.decode, hit.n_match
        log.debug(
            "request %s: %d of %d prompt tokens are in the cache and %d can be used; behind %r the prompt says %r, the cache %r",
            *(job.id, at, job.n_prompt, hit.n),
            *(
                decode(ids, special=True)
                for ids in (job.prefill[max(0, at - 8) : at], job.prefill[at : at + 16], hit.other)
            ),
        )
