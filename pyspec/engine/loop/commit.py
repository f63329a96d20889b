"""Makes verdicts final: gives tokens to requests and slots, files pages for later prompts, and ends requests.

Tokens and samplers' histories are committed at once, because the next draft is judged by them. Counts and events may wait until the
device runs the next round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from pyspec.device.worker import Worker
from pyspec.engine.loop.disk_tier import DiskTier
from pyspec.engine.loop.job import End, Job, Taken, blamed
from pyspec.engine.loop.pending_round import PendingRound
from pyspec.engine.loop.round import Work
from pyspec.engine.loop.speculator import Speculator
from pyspec.engine.loop.stats import Stats
from pyspec.engine.policy.queue import cut_of, worth_on
from pyspec.errors import PyspecError, SlotError, Unavailable
from pyspec.repeats import limited
from pyspec.request import Failed
from pyspec.sample.choose import Chosen
from pyspec.slots.cache import PrefixCache
from pyspec.slots.states import Saved
from pyspec.slots.table import Slot

log = limited(__name__)


class Committer:
    """Commits rounds and ends requests. jobs: seated ones by slot; a request that ends leaves it.

    defers    put off counts and events until `flush_deferred`
    on_first  delivers events; called after a round of first tokens
    on_leave  called with a request that has ended, whose slot still has its tokens
    """

    def __init__(
        self,
        jobs: dict[int, Job],
        worker: Worker,
        speculator: Speculator,
        cache: PrefixCache,
        stats: Stats,
        *,
        defers: bool,
    ) -> None:
        self.jobs = jobs
        self.worker = worker
        self.speculator = speculator
        self.cache, cache.growing = cache, self.growing
        self.stats = stats
        self.defers = defers
        self.disk: DiskTier | None = None
        self.later: list[Callable[[], None]] = []
        self.on_first: Callable[[], None] = lambda: None
        self.on_leave: Callable[[Job], None] = lambda job: None

    # -- a round -------------------------------------------------------------------------------------------------

    def commit(
        self, pending: PendingRound, chosen: Sequence[Chosen | None], ahead: PendingRound | None
    ) -> None:
        """Keep the accepted rows. The drafter observes them before the slots' tokens grow."""
        kept, ends = [], []
        are_first = not any(w.job.is_decoding for w in pending.work)
        for w, c in zip(pending.work, chosen, strict=True):
            n, end = self._take(w, c) if pending.still_running(w, self.jobs) else (0, None)
            kept.append(n)
            ends.append(end)
        if (
            are_first and self.later
        ):  # clients wait for these tokens, and not for state copies or the next launch
            self.flush_deferred()
            self.on_first()
        if not pending.is_settled:
            self.speculator.observe(pending.launched.batch, kept, pending.launched.out)
        then = {} if ahead is None else {w.slot.index: w.seq for w in ahead.work}
        for w, n, end in zip(pending.work, kept, ends, strict=True):
            if n == 0:
                continue  # its request has ended
            if not pending.is_settled:
                w.slot.tokens.extend(w.seq.tokens[:n])
            # the next round, if it is launched, folds these records or leaves them
            following = then.get(w.slot.index)
            w.slot.n_fold = w.seq.n_recorded(n) if following is None else following.n_recorded(0)
            if end is not None:
                self.finish(w.job, end)
            elif w.slot.n_past <= w.job.n_prefill:
                self._after_chunk(w)
                self._keep_start(pending, w)
        if ahead is not None and ahead.launched.tokens is not None:
            self.speculator.confirm_ahead(
                w.slot for w in ahead.work if ahead.still_running(w, self.jobs)
            )
        if not self.defers:
            self.flush_deferred()

    def settle(self, pending: PendingRound) -> None:
        """Keep the rows of a whole prompt that the device reads: they are kept whatever its first token is, which `commit` adds."""
        launched, (w,) = pending.launched, pending.work
        launched.copy_results(self.worker.plan, is_next_launched=True)
        self.speculator.observe(launched.batch, [w.seq.width], launched.out)
        w.slot.tokens.extend(w.seq.tokens)
        w.slot.n_fold, pending.is_settled = 0, True

    def start(self, job: Job, c: Chosen) -> None:
        """Send the first token of a request whose whole prompt was cached."""
        if c.error is not None:
            self.finish(job, End("error", error=c.error))
            return
        try:
            job.progress(job.n_prefill)
            taken = job.take(c.tokens)
            job.sampler.commit(c.tokens[: taken.n_used])
        except Exception as e:  # as in a round, see _take
            if not isinstance(e, SlotError):
                log.exception("request %s failed", job.id)
            self.finish(job, End("error", error=blamed(e)))
            return
        self.stats.predicted_tokens += taken.n_used
        self.later.append(partial(job.send_delta, taken, c.logprobs or (), 0, 0))
        if taken.finish is not None:
            self.finish(job, End(taken.finish, taken.stop))
        else:
            job.anchor = c.tokens[-1]
        if not self.defers:
            self.flush_deferred()

    def _take(self, w: Work, c: Chosen | None) -> tuple[int, End | None]:
        """Rows kept of a request's part, and its end if it ends. An exception here fails only this request."""
        try:
            return self._hand_over(w, c)
        except Exception as e:
            if not isinstance(e, SlotError):
                log.exception("request %s failed", w.job.id)
            return (w.seq.width if w.seq.keep else 1), End("error", error=blamed(e))

    def _hand_over(self, w: Work, c: Chosen | None) -> tuple[int, End | None]:
        """Give a request its tokens."""
        if not w.job.is_decoding:
            w.job.progress(w.seq.n_past + w.seq.width)
        if c is None:
            return w.seq.width, None
        if c.error is not None:
            return (w.seq.width if w.seq.keep else 1), End("error", error=c.error)
        was_decoding = w.job.is_decoding
        if was_decoding:
            self.speculator.judge(w.slot.index, len(w.draft), c.n_accepted)
        taken = w.job.take(c.tokens)
        w.job.sampler.commit(c.tokens[: taken.n_used])
        self.later.append(partial(self._report, w, c, taken, was_decoding))
        # Row 0 is the anchor, row i the draft i. The last token gets no row, drafted or not: the pages that a request
        # leaves do not depend on speculation.
        kept = max(1, min(taken.n_used, 1 + c.n_accepted)) if was_decoding else w.seq.width
        if taken.finish is not None:
            return kept, End(taken.finish, taken.stop)
        w.job.anchor = c.tokens[-1]
        return kept, None

    def _report(self, w: Work, c: Chosen, taken: Taken, was_decoding: bool) -> None:
        """Count, and send the Delta. The next round needs none of it."""
        n_draft = len(w.draft)
        if was_decoding:
            w.job.count(n_draft, c.n_accepted, w.drafts.source)
            self.stats.verdict(n_draft, c.n_accepted, w.drafts.source)
        self.stats.predicted_tokens += taken.n_used
        w.job.send_delta(taken, c.logprobs or (), n_draft, c.n_accepted)

    def flush_deferred(self) -> None:
        """Run the deferred counts and events."""
        later, self.later = self.later, []
        for do in later:
            do()

    # -- filing --------------------------------------------------------------------------------------------------

    def _after_chunk(self, w: Work) -> None:
        """File a prompt chunk where a checkpoint is due, or at the prompt's end if no state is needed."""
        at = w.slot.n_past
        if at in w.job.cuts or (at == w.job.n_prefill and not self.worker.memory.needs_state):
            self._file(w.job, w.slot)

    def _file(self, job: Job, slot: Slot, *, whole: bool = False) -> bool:
        """File the slot's committed tokens. Returns False if the request or the drafter's state forbids it."""
        if not self._may_file(job, slot):
            return False
        draft = self.speculator.checkpoint(slot)
        if slot.index in self.speculator.lost_track:
            return False
        n_unread = self.speculator.read.n_unread(slot)
        if whole or slot.n_past % self.worker.table.page_size == 0 or slot.n_past not in job.cuts:
            self.cache.file(slot, draft, self.worker.fold, whole=whole, n_unread=n_unread)
        else:
            pools = self.worker.pools()
            self.cache.file_copy(slot, draft, self.worker.fold, pools, n_unread=n_unread)
        self.speculator.filed(slot)
        return True

    def _keep_start(self, pending: PendingRound, w: Work) -> None:
        """Keep the state and the last logits of a short prompt, if no other checkpoint of it is filed."""
        job, slot = w.job, w.slot
        is_due = (
            slot.n_past == job.n_prefill and self.worker.memory.needs_state and self._may_file(job, slot)
        )
        worth = worth_on(self.worker.device.type)
        is_cut = cut_of(job.n_prefill, self.worker.table.page_size, worth)
        if not is_due or job.goes_on or not job.reuses or is_cut:
            return
        draft = self.speculator.checkpoint(slot)
        if slot.index in self.speculator.lost_track:
            return
        row = sum(each.seq.n_out for each in pending.work[: pending.work.index(w) + 1])
        self.worker.fold(slot)
        job.start = self.cache.keep_start(slot, draft, pending.launched.out.logits[row - 1 : row])

    def growing(self) -> list[Slot]:
        """Slots with an answer that will be filed at its end."""
        jobs = self.jobs.values()
        return [
            j.slot for j in jobs if j.is_decoding and j.slot is not None and self._may_file(j, j.slot)
        ]

    def _may_file(self, job: Job, slot: Slot) -> bool:
        lost = self.speculator.lost_track
        return self.cache.on and job.request.cache_prompt and slot.index not in lost and slot.n_past > 0

    def suspend(self, job: Job) -> None:
        """Take a request out of its slot before its end. The cache keeps its tokens, so it resumes from there."""
        self.flush_deferred()
        slot = job.slot
        assert slot is not None
        self._file(job, slot, whole=True)
        self.speculator.end(slot)
        self.jobs.pop(slot.index)
        job.put_off()
        self.worker.table.release(slot, trusted=True)

    # -- the end of a request ------------------------------------------------------------------------------------

    def finish(self, job: Job, end: End) -> None:
        """Free the slot. The cache keeps its committed tokens, unless the request failed."""
        self.flush_deferred()
        slot = job.slot
        assert slot is not None
        self.stats.finished(job, end.finish)
        slot.left = tuple(slot.tokens) if end.error is None and self._file(job, slot, whole=True) else ()
        slot.left_owner = slot.owner
        self._let_go_of_start(job, slot if slot.left else None)
        if self.disk is not None and slot.left:
            self.disk.keep(slot.left, job.n_prompt, slot.owner.salt)
        self.speculator.end(slot)
        self.on_leave(self.jobs.pop(slot.index))
        self.worker.table.release(slot, trusted=end.error is None)
        if end.error is not None:
            job.sink(Failed(job.id, end.error))
            log.log(_level(end.error), "request %s failed in slot %d: %s", job.id, slot.index, end.error)
            return
        job.done(end.finish, end.stop)
        t = job.timings()
        log.info(
            "request=%s slot=%d finish=%s prompt=%d cached=%d tokens=%d tok/s=%.1f rounds=%d mean_len=%.2f",
            *(job.id, slot.index, end.finish, job.n_prompt, job.n_cached, job.n_predicted),
            *(t.predicted_per_second, t.n_rounds, t.mean_len),
        )

    def _let_go_of_start(self, job: Job, slot: Slot | None) -> None:
        """File the job's start behind the pages of `slot`, or drop it if there is none."""
        start, job.start = job.start, None
        if not isinstance(start, Saved):
            return
        if slot is not None:
            self.cache.file_start(slot, start)
        else:
            self.cache.drop_start(start)

    def blame(self, error: SlotError) -> None:
        """A forward rejected its batch: end the request in the slot that it names, or all requests if it names none.

        The others repeat the same rows. That is safe because indices are checked before any state is written.
        """
        self.stats.guard_trips += 1
        guilty = [self.jobs[error.slot]] if error.slot in self.jobs else list(self.jobs.values())
        for job in guilty:
            self.finish(job, End("error", error=error))

    def drop_all(self, error: PyspecError) -> None:
        """Fail every seated request with `error`. File nothing and do not call the drafter: it may be the broken part."""
        self.flush_deferred()
        for job in list(self.jobs.values()):
            self._let_go_of_start(job, None)
            self.on_leave(job)
            job.sink(Failed(job.id, error))
            self.stats.requests_failed += 1
        self.jobs.clear()
        for slot in self.worker.table.slots:
            if slot.busy:
                slot.left = ()
                self.worker.table.release(slot, trusted=False)


def _level(error: PyspecError) -> int:
    """Log level of a request's failure: debug for a close, warning for a client's mistake, error for ours."""
    if isinstance(error, Unavailable):
        return logging.DEBUG
    return logging.WARNING if error.status < 500 else logging.ERROR
