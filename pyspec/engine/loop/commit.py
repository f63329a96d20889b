"""Making a verdict final: tokens to requests and slots, what is filed for later prompts, how requests end, and who hears of it.

Tokens and samplers' histories are committed at once: the next draft is judged by them. Counts and events may wait until the
device is at work on the next round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from pyspec.device.worker import Worker
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
    """Commits rounds and ends requests. `jobs`: those that sit, by slot; a request that ends leaves it.

    defers  counts and events wait for `flush_deferred`
    on_first  hands out what was settled; called where a round gave nothing but first tokens
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
        self.jobs, self.worker, self.speculator, self.cache, self.stats = jobs, worker, speculator, cache, stats
        self.defers = defers
        self.later: list[Callable[[], None]] = []
        self.on_first: Callable[[], None] = lambda: None

    # -- a round -------------------------------------------------------------------------------------------------

    def commit(self, pending: PendingRound, chosen: Sequence[Chosen | None], ahead: PendingRound | None) -> None:
        """Keep what was accepted; the drafter hears of it before the slots' tokens grow."""
        kept, ends = [], []
        are_first = not any(w.job.is_decoding for w in pending.work)
        for w, c in zip(pending.work, chosen, strict=True):
            n, end = self._take(w, c) if pending.still_running(w, self.jobs) else (0, None)
            kept.append(n)
            ends.append(end)
        if (
            are_first and self.later
        ):  # nobody waits for the next round; copies of states and its launches take their time
            self.flush_deferred()
            self.on_first()
        self.speculator.observe(pending.launched.batch, kept, pending.launched.out)
        for i, (w, n, end) in enumerate(zip(pending.work, kept, ends, strict=True)):
            if n == 0:
                continue  # it is not on any more
            w.slot.tokens.extend(w.seq.tokens[:n])
            if ahead is None:
                w.slot.n_fold = 0 if w.seq.keep else n + w.seq.n_fold * w.seq.late
            else:  # what is ahead folds it, or leaves it where it is
                behind = ahead.work[i].seq
                w.slot.n_fold = behind.n_fold * behind.late
            if end is not None:
                self.finish(w.job, end)
            elif w.slot.n_past <= w.job.n_prefill:
                self._after_chunk(w)
                self._keep_start(pending, w)
        if ahead is not None and ahead.launched.tokens is not None:
            self.speculator.confirm_ahead(w.slot for w in ahead.work if ahead.still_running(w, self.jobs))
        if not self.defers:
            self.flush_deferred()

    def start(self, job: Job, c: Chosen) -> None:
        """The first token of a request whose prompt was there to its end."""
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
        """Rows kept of a request's part, and how it ends if it does. Whatever goes wrong with its tokens is its own failure."""
        try:
            return self._hand_over(w, c)
        except Exception as e:
            if not isinstance(e, SlotError):
                log.exception("request %s failed", w.job.id)
            return (w.seq.width if w.seq.keep else 1), End("error", error=blamed(e))

    def _hand_over(self, w: Work, c: Chosen | None) -> tuple[int, End | None]:
        """Hand a request its tokens."""
        if not w.job.is_decoding:
            w.job.progress(w.slot.n_past + w.seq.width)
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
        # row 0 is the anchor, row i the draft i; the last token gets no row, drafted or not: what a request leaves does not
        # depend on speculation
        kept = max(1, min(taken.n_used, 1 + c.n_accepted)) if was_decoding else w.seq.width
        if taken.finish is not None:
            return kept, End(taken.finish, taken.stop)
        w.job.anchor = c.tokens[-1]
        return kept, None

    def _report(self, w: Work, c: Chosen, taken: Taken, was_decoding: bool) -> None:
        """What nothing in the next round depends on: counts, and the Delta."""
        n_draft = len(w.draft)
        if was_decoding:
            w.job.count(n_draft, c.n_accepted)
            self.stats.verdict(n_draft, c.n_accepted)
        self.stats.predicted_tokens += taken.n_used
        w.job.send_delta(taken, c.logprobs or (), n_draft, c.n_accepted)

    def flush_deferred(self) -> None:
        """Do what was put off."""
        later, self.later = self.later, []
        for do in later:
            do()

    # -- filing --------------------------------------------------------------------------------------------------

    def _after_chunk(self, w: Work) -> None:
        """A prompt chunk is in: leave it to others where a checkpoint is due, or where none is needed at the prompt's end."""
        at = w.slot.n_past
        if at in w.job.cuts or (at == w.job.n_prefill and not self.worker.memory.needs_state):
            self._file(w.job, w.slot)

    def _file(self, job: Job, slot: Slot, *, whole: bool = False) -> bool:
        """File what the slot has committed, unless the request or the drafter's state forbids it. False: it did."""
        if not self._may_file(job, slot):
            return False
        draft = self.speculator.checkpoint(slot)
        if slot.index in self.speculator.lost_track:
            return False
        self.cache.file(slot, draft, self.worker.fold, whole=whole)
        return True

    def _keep_start(self, pending: PendingRound, w: Work) -> None:
        """A short prompt is in, of which nothing else is filed that could be gone on from: keep its state, and what its last token gave."""
        job, slot = w.job, w.slot
        is_due = slot.n_past == job.n_prefill and self.worker.memory.needs_state and self._may_file(job, slot)
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

    def _may_file(self, job: Job, slot: Slot) -> bool:
        lost = self.speculator.lost_track
        return self.cache.on and job.request.cache_prompt and slot.index not in lost and slot.n_past > 0

    def suspend(self, job: Job) -> None:
        """Take a request out of its slot before its end. What was read and said is in the cache: it goes on from there."""
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
        """Give the slot back. What it committed stays in the cache, unless something went wrong."""
        self.flush_deferred()
        slot = job.slot
        assert slot is not None
        slot.left = tuple(slot.tokens) if end.error is None and self._file(job, slot, whole=True) else ()
        self._let_go_of_start(job, slot if slot.left else None)
        self.speculator.end(slot)
        self.jobs.pop(slot.index)
        self.worker.table.release(slot, trusted=end.error is None)
        self.stats.finished(job, end.finish)
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
        if self.speculator.has_collapsed(job):
            self._start_drafts_anew()

    def _let_go_of_start(self, job: Job, slot: Slot | None) -> None:
        """Its start is filed behind the pages of `slot`, if there is one, or gone."""
        start, job.start = job.start, None
        if not isinstance(start, Saved):
            return
        if slot is not None:
            self.cache.file_start(slot, start)
        else:
            self.cache.drop_start(start)

    def _start_drafts_anew(self) -> None:
        """Acceptance has collapsed: what drafts are made from, beside weights, is what slots and the cache hold of the drafter's."""
        log.warning(
            "the drafter was right for %.0f %% of its tokens and has been for %.0f %% in the last %d requests: what the cache holds"
            " of its state is dropped, and drafting starts anew",
            *(100 * self.speculator.watch.was, 100 * self.speculator.watch.now, self.speculator.watch.MANY),
        )
        self.worker.table.clear()
        self.speculator.controller.forget_acceptance()

    def blame(self, error: SlotError) -> None:
        """A forward refused its batch: end the request in the slot it names, or all if it names none.

        The others lay out the same rows again, which is right because indices are checked before any state is written.
        """
        self.stats.guard_trips += 1
        guilty = [self.jobs[error.slot]] if error.slot in self.jobs else list(self.jobs.values())
        for job in guilty:
            self.finish(job, End("error", error=error))

    def drop_all(self, error: PyspecError) -> None:
        """Every seated request hears `error`. Nothing is filed, and nothing asked of the drafter: it may be what broke."""
        self.flush_deferred()
        for job in list(self.jobs.values()):
            self._let_go_of_start(job, None)
            job.sink(Failed(job.id, error))
            self.stats.failed += 1
        self.jobs.clear()
        for slot in self.worker.table.slots:
            if slot.busy:
                slot.left = ()
                self.worker.table.release(slot, trusted=False)


def _level(error: PyspecError) -> int:
    """How loudly a request's failure is logged: a close is none, and what its own sender did is nobody's to mend here."""
    if isinstance(error, Unavailable):
        return logging.DEBUG
    return logging.WARNING if error.status < 500 else logging.ERROR
