"""Admission: waiting requests get slots, with the cached part of their prompts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from pyspec.device.worker import Worker, is_device_error
from pyspec.engine.loop.disk_tier import DiskTier, Restore
from pyspec.engine.loop.job import Job, blamed
from pyspec.engine.loop.pictures import Pictures
from pyspec.engine.loop.speculator import Speculator
from pyspec.engine.loop.stats import Stats
from pyspec.engine.loop.suffix_source import TextToDraft
from pyspec.engine.policy.evict import SHORT
from pyspec.engine.policy.queue import ANSWER, Queue, cuts_of, worth_on
from pyspec.errors import PyspecError
from pyspec.repeats import limited
from pyspec.request import Failed, Started
from pyspec.slots.cache import PrefixCache
from pyspec.slots.prefix import NO_HIT, Hit
from pyspec.slots.states import Saved
from pyspec.slots.table import Slot

log = limited(__name__)

DISK_WAIT_S = 0.01  # most seconds that a round without rows waits for the disk
MOST_SUSPENDED = 8  # suspensions of one request
PATIENCE_S = 5.0
"""Seconds that a short request waits before it takes the slot of one that has generated more than it asks for. It does so once, so
the number of requests bounds the cost."""


@dataclass(frozen=True, slots=True, eq=False)
class Seated:
    """A request in a slot with the part of its prompt in `hit`, and the search for more of it on the disk, since `began`; or None, where it
    waits for rows of its pictures, which the cache has lost since it was asked. draft: the drafter's share of what it has"""

    job: Job
    slot: Slot
    hit: Hit
    saved: Saved | None
    restore: Restore | None
    began: float
    draft: object | None = None


class Admission:
    """Seats waiting requests. jobs: seated ones by slot, in order of arrival."""

    def __init__(
        self,
        queue: Queue[Job],
        jobs: dict[int, Job],
        worker: Worker,
        speculator: Speculator,
        cache: PrefixCache,
        stats: Stats,
        pictures: Pictures,
    ) -> None:
        self.queue, queue.running = queue, self._seated
        self.pictures, queue.may_sit = pictures, lambda job: job.may_sit
        self.jobs = jobs
        self.worker = worker
        self.speculator = speculator
        self.cache, self.stats, self.table = cache, stats, worker.table
        self.synthetic = False  # synthetic acceptance
        self.clock: Callable[[], float] = time.perf_counter  # the clock of the jobs
        self.ready: list[
            tuple[Job, Tensor]
        ] = []  # seated with their whole prompt cached, and its last token's logits
        self.disk: DiskTier | None = None
        self.restoring: list[Seated] = []  # seated, while the disk is asked for their prompts

    def update(self) -> None:
        """Drop requests that were cancelled while waiting, and seat the next ones."""
        for gone in [job for job in self.queue.waiting() if job.cancelled]:
            self.queue.remove(gone)
            self._drop(gone)
        for seated in list(self.restoring):
            self._go_on(seated)
        self._look_at_pictures()
        while (job := self.queue.next(self.table)) is not None:
            self._seat(job)
        self.pictures.forget_unwanted()
        if self.disk is not None and self.restoring and not self.jobs and not self.pictures.is_busy:
            with self.worker.lock.released():
                self.disk.wait(DISK_WAIT_S)

    def _look_at_pictures(self) -> None:
        """Have pictures encoded for the requests that come next, as far as the cache has not their rows. A tier on disk is asked once they are
        seated."""
        slots = self.table.slots
        waiting = [
            job
            for job in self.queue.waiting()
            if job.images and not (job.wanted_slot >= 0 and slots[job.wanted_slot].busy)
        ]
        for job in waiting[: len(slots)]:
            try:
                if job.n_seen < 0:
                    job.n_seen = self.cache.find(job.prefill, job.owner).n if job.reuses else 0
                asks_disk = self.disk is not None and job.reuses
                job.may_sit = asks_disk or self.pictures.ready(job, job.n_seen)
            except PyspecError as e:
                self.queue.remove(job)
                self._fail(job, e)

    def _seat(self, job: Job) -> None:
        """Give a request its slot, with the cached part of its prompt. A failure ends only this request."""
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
            self._fail(job, blamed(e))

    def _drop(self, job: Job) -> None:
        """End a request that was cancelled before it could begin."""
        self.queue.leave(job)
        self.stats.finished(job, "cancelled")
        job.done("cancelled")

    def _fail(self, job: Job, error: PyspecError) -> None:
        """End a request that could not begin."""
        self.queue.leave(job)
        self.stats.requests_failed += 1
        job.sink(Failed(job.id, error))

    def _begin(self, job: Job, slot: Slot) -> None:
        hit, pools = (
            self.cache.find(job.prefill, job.owner) if job.reuses else NO_HIT,
            self.worker.pools(),
        )
        saved = self.cache.seat(slot, job.n_rows, job.prefill, hit, pools, job.owner)
        slot.images = job.images
        if self.disk is not None and job.reuses:
            restore = self.disk.begin(slot, job.prefill, hit)
            if restore is not None:
                self.restoring.append(Seated(job, slot, hit, saved, restore, time.perf_counter()))
                return
        draft = saved.draft if saved is not None else None
        if self.pictures.ready(job, slot.n_past):
            self._start(job, slot, hit, saved, draft)
        else:
            self.restoring.append(Seated(job, slot, hit, saved, None, time.perf_counter(), draft))

    def _go_on(self, seated: Seated) -> None:
        """Take in what the disk has for a request, and start it once that is all. A failure ends only this request."""
        disk, job, slot, restore = self.disk, seated.job, seated.slot, seated.restore
        try:
            if job.cancelled:
                self._give_up(seated)
                self._drop(job)
                return
            if restore is not None:
                assert disk is not None
                if not disk.advance(restore):
                    return
                draft = disk.finish(restore)
                if slot.n_past == restore.n_have and seated.saved is not None:
                    draft = seated.saved.draft
                self.restoring.remove(seated)
                seated = replace(seated, restore=None, draft=draft)
                self.restoring.append(seated)
            if self.pictures.ready(job, slot.n_past):
                self.restoring.remove(seated)
                self._start(job, slot, seated.hit, seated.saved, seated.draft)
                if not job.n_suspended:
                    job.n_disk, job.started = max(0, job.n_cached - seated.hit.n), seated.began
        except Exception as e:
            if is_device_error(e):
                raise
            log.exception("request %s could not be restored", job.id)
            if seated in self.restoring:
                self._give_up(seated)
            elif slot.busy:
                self.table.release(slot, trusted=False)
            self._fail(job, blamed(e))

    def _give_up(self, seated: Seated) -> None:
        """Free the slot of a request that the disk is asked for."""
        self.restoring.remove(seated)
        if seated.restore is not None:
            seated.restore.is_stopped = True
            if self.disk is not None:
                self.disk.stop(seated.restore)
        self.table.release(seated.slot, trusted=False)

    def drop_restoring(self, error: PyspecError) -> None:
        """Fail the requests that the disk is asked for, and forget those that would begin next: they fail with all others."""
        self.ready.clear()
        for seated in list(self.restoring):
            self._give_up(seated)
            self._fail(seated.job, error)

    def _seated(self) -> list[Job]:
        """Requests that have a slot, those that the disk is asked for, too."""
        return [*self.jobs.values(), *(seated.job for seated in self.restoring)]

    @property
    def restoring_jobs(self) -> dict[int, Job]:
        """By slot."""
        return {seated.slot.index: seated.job for seated in list(self.restoring)}

    @property
    def has_restored(self) -> bool:
        """The disk has given or refused something, or a picture was encoded, or came."""
        news = [s.job.cancelled or self._has_news(s.restore) for s in self.restoring]
        return self.pictures.has_news or any(news)

    def _has_news(self, restore: Restore | None) -> bool:
        return self.disk is not None and restore is not None and self.disk.has_news(restore)

    def _start(self, job: Job, slot: Slot, hit: Hit, saved: Saved | None, draft: object | None) -> None:
        """Begin a request in a slot that holds the cached part of its prompt. draft: the drafter's share there."""
        request, size, cache = job.request, self.table.page_size, self.cache
        self.speculator.begin(
            slot,
            draft,
            grammar="" if request.grammar is None else request.grammar.source,
            text=TextToDraft.of(job),
            n_unread=hit.n_unread,
            may_draft=request.n_draft_max != 0,
        )
        files = cache.on and request.cache_prompt and self.worker.memory.needs_state
        places = {hit.n_match, request.n_before_turn, request.n_system}
        n_stable, worth = request.n_stable or job.n_prefill, worth_on(self.worker.device.type)
        about = n_stable, size, slot.n_past, places, cache.every, worth, job.images
        job.begin(slot, cuts_of(*about) if files else ())
        if hit.break_at >= 0 and slot.n_past == hit.n and not job.goes_on:
            job.cache_break_at = hit.break_at
            log.debug(
                "request %s: %d of %d prompt tokens are in the cache and %d can be used; its client's texts leave the prompt at %d",
                *(job.id, hit.n_match, job.n_prompt, hit.n, hit.break_at),
            )
        job.synthetic = self.synthetic
        self.jobs[slot.index] = job
        self.queue.seated(job)
        if saved is not None and saved.logits is not None and slot.n_past == job.n_prefill:
            self.ready.append((job, saved.logits.to(self.worker.device)))
        if not job.n_suspended:
            job.sink(Started(job.id, slot.index, job.n_prompt, job.n_cached))

    def in_the_way(self) -> Job | None:
        """The job to suspend for a short request that waits while all slots are busy; None if there is none.

        First choice is a long prompt that is still being read, then a job whose turn is over.
        """
        short = self._short()
        if short is None:
            return None
        least = 2 * short.cost + SHORT
        found = [job for job in self._movable() if not job.is_decoding and job.todo[0] > least]
        return max(found, key=lambda job: job.todo[0], default=None) or self._had_its_turn(short)

    @property
    def is_turn_over(self) -> bool:
        """A decoding job will be suspended at the next round."""
        short = self._short()
        return short is not None and self._had_its_turn(short) is not None

    def _short(self) -> Job | None:
        """The first waiting request, if all slots are busy and it is short and new."""
        if not len(self.queue) or not all(slot.busy for slot in self.table.slots) or not self.cache.on:
            return None
        short = next((job for job in self.queue.waiting() if job.wanted_slot < 0), None)
        return None if short is None or short.cost > SHORT or short.n_suspended else short

    def _had_its_turn(self, short: Job) -> Job | None:
        """The job that generated most since it was seated, if that exceeds the request of `short`, which has waited PATIENCE_S.

        This is least attained service first: no text holds a slot without limit, read by its client or not.
        """
        if self.clock() - short.started < PATIENCE_S:
            return None
        asked = short.cost + min(short.n_left, ANSWER)
        found = [job for job in self._movable() if job.is_decoding and job.n_given > asked]
        return max(found, key=lambda job: job.n_given, default=None)

    def _movable(self) -> list[Job]:
        """Jobs that can resume from the cache, in any slot, with the same text."""
        return [job for job in self.jobs.values() if self._may_wait(job)]

    def _may_wait(self, job: Job) -> bool:
        may = job.reuses and job.n_suspended < MOST_SUSPENDED and not job.cancelled
        if job.is_decoding:  # a time limit or a pinned slot is part of the request
            may = may and job.request.max_predict_ms <= 0 and job.wanted_slot < 0
        return may and job.slot is not None and job.slot.index not in self.speculator.lost_track
