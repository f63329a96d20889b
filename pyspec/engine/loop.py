"""The loop: one round drafts, verifies, accepts and commits for every busy slot. Open this file first.

`step` is the whole trip; everything it calls is one idea. It runs on one thread and knows no drafter or architecture by
name. A request's failure ends that request; only a DeviceError (or a bug) stops the loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from pyspec.cuda.context import gpu_lock
from pyspec.cuda.faults import EVERYONE, Fault, Reader
from pyspec.cuda.graph import Graphed
from pyspec.cuda.ops.recurrent.fold import flush
from pyspec.draft.drafter import Drafter, DraftRequest, LookaheadDrafter, Needs, PagedDrafter
from pyspec.engine.admission import Queue, cuts_of, share_rows
from pyspec.engine.controller import Controller
from pyspec.engine.job import End, Job, Taken
from pyspec.engine.lookahead import Course, Flight, Pinned, Work, stamp
from pyspec.engine.stats import Stats
from pyspec.errors import PyspecError, SlotError, Unavailable
from pyspec.models.target import Out, Target
from pyspec.request import Failed, Started
from pyspec.sample.choose import Chosen, Span, choose, top
from pyspec.sample.synth import SynthAcceptance
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch, Seq, lay_out
from pyspec.slots.cache import PrefixCache
from pyspec.slots.memory import Memory
from pyspec.slots.parts import PartMemory
from pyspec.slots.prefix import NO_HIT
from pyspec.slots.states import StateStore
from pyspec.slots.table import Slot, SlotTable

log = logging.getLogger(__name__)

NO_NEEDS = Needs(0)
PROMPT_SHARE = 8  # prompts get at least this part of a forward, however many rows the decoding slots take


class Loop:
    """Owns what runs: target, drafter, slots, memory, controller, statistics, and the jobs."""

    def __init__(
        self,
        target: Target,
        memory: Memory,
        table: SlotTable,
        drafter: Drafter | None,
        controller: Controller,
        *,
        ubatch: int,
        batch: int = 0,
        queue_limit: int,
        synth: SynthAcceptance | None = None,
        arena: Arena | None = None,
        cache: PrefixCache | None = None,
    ) -> None:
        self.target, self.memory, self.table, self.drafter = target, memory, table, drafter
        self.needs = drafter.needs if drafter is not None else NO_NEEDS
        self.controller, self.synth = controller, synth
        self.ubatch, self.batch = ubatch, batch or ubatch  # rows of a forward; of one in which nobody decodes
        self.arena = arena  # where graphs find their batches; None: no graphs
        self.forward, self.gpu_lock = Graphed(self._run, by_single=self.needs.late), gpu_lock(target.device)
        self.pinned = Pinned(), Pinned()  # what greedy rounds read, and the tokens they ran with
        self.faults, self.draft_faults = Reader(target.device), Reader(target.device)
        self.queue: Queue[Job] = Queue(queue_limit)
        self.jobs: dict[int, Job] = {}  # by slot, in order of arrival
        self.cache = cache or PrefixCache(table, memory, StateStore(1 << 62, 0))
        self.deaf: set[int] = set()  # slots the drafter lost track of: no drafts until their requests end
        self.stats = Stats(controller.n_max)
        self.on_wait: Callable[[], None] = lambda: None  # called while the device is at work on a round
        self.may_defer = target.device.type != "cpu"  # there a forward is over when it returns
        self.may_fly_ahead = self.may_defer and arena is not None
        self.course = Course(target.device, table, arena, synth)
        self.flight: Flight | None = None  # launched ahead, while the round before it was under way
        self.landed = self.ended = 0.0  # when the last forward's results were there, and when its round was over
        self.picked: list[tuple[int, int]] | None = None  # drafts by slot that the controller chose for the next round
        self.later: list[Callable[[], None]] = []  # what is put off until the device is at work on the next round

    # -- the round -----------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self.jobs and not len(self.queue)

    def step(self) -> None:
        """One round for every busy slot: draft, verify, accept, commit."""
        with self.gpu_lock:
            self._round()

    def _round(self) -> None:
        flight, self.flight = self.flight, None
        if flight is not None and self._must_land():
            self._land(flight, None)
            flight = None
        flight = self._launch() if flight is None else flight
        if flight is not None:
            self.flight = self._fly_ahead(flight)
            self._land(flight, self.flight)

    def _launch(self) -> Flight | None:
        """Seat, draft, lay out, and tell the device."""
        self._drop_cancelled()
        self._admit()
        if not self.jobs:
            return None
        began = time.perf_counter()
        asks, drafts = self._draft()
        drafted = time.perf_counter()
        work = self._plan(asks, drafts)
        try:
            batch = lay_out(self.table, [w.seq for w in work], self.target.device, arena=self.arena)
            self._watch()
            return self._send(work, batch, began, drafted)
        except SlotError as e:
            self.draft_faults.fetched.clear()
            self._blame(e)
            return None

    def _send(
        self,
        work: Sequence[Work],
        batch: Batch,
        began: float = 0.0,
        drafted: float = 0.0,
        *,
        reads_tokens: bool = False,
    ) -> Flight:
        launched = time.perf_counter()
        out = self.forward(batch)
        best = None if out.best is None else self.pinned[0].copy(out.best)
        tokens = self.pinned[1].copy(batch.tokens[: batch.n_row]) if reads_tokens else None
        self.faults.fetch()
        return Flight(work, batch, out, best, stamp(self.target.device), began, drafted, launched, tokens=tokens)

    def _must_land(self) -> bool:
        """Somebody waits for what only happens between two rounds."""
        waiting = self.queue.waiting()
        may_sit = len(waiting) > 0 and any(not slot.busy for slot in self.table.slots)
        return may_sit or not self.jobs or any(job.cancelled for job in (*self.jobs.values(), *waiting))

    def _fly_ahead(self, flight: Flight) -> Flight | None:
        """Launch the round after this one before its results are read, if the same requests go on behind whatever it gives."""
        work = flight.work
        if not self.may_fly_ahead or len(work) != len(self.jobs) or self._must_land():
            return None
        if not all(self._is_on(flight, w) and self.course.goes_on(w) for w in work):
            return None
        self.picked = self._pick([w.job for w in work], [w.seq.width for w in work])
        n_drafts = [n for _, n in self.picked]
        if self.synth is not None:
            self._settle()  # coins are thrown by what is committed
        if any(n_drafts) and any(w.slot.index in self.deaf for w in work):
            return None
        n_fetched = len(self.draft_faults.fetched)
        try:
            laid = self.course.lay_out(flight, n_drafts, self.drafter)
            if laid is None:
                return None
            if laid.has_drafts:
                self._watch()
            flight.keep(self.needs, True)
            ahead = self._send(laid.work, laid.batch, reads_tokens=laid.has_drafts)
        except SlotError:  # it is found again, and whose it is, when this round is over
            while len(self.draft_faults.fetched) > n_fetched:
                self.draft_faults.fetched.pop()
            return None
        self.picked, ahead.ahead, ahead.on_device = None, True, laid.on_device
        return ahead

    def _land(self, flight: Flight, ahead: Flight | None) -> None:
        """Read a round's results and commit them. `ahead`: the next one that is under way, for the same slots."""
        fault = self._wait(flight)
        verified = time.perf_counter()
        since = flight.drafted
        if flight.ahead:
            since = max(flight.launched, self.landed) + flight.name_tokens(self.ended)
        work, self.landed = [w for w in flight.work if self._is_on(flight, w)], verified
        if not work:
            return  # all ended with the round before
        chosen = self._choose(flight.work, flight.out, flight.found)
        if ahead is not None:
            chosen, ahead.off = flight.agree(chosen)
        else:
            flight.keep(self.needs, False)
        if fault is not None:
            self.stats.guard_trips += 1
            chosen = flight.condemn(fault, chosen)
        sampled = time.perf_counter()
        self._commit(flight, chosen, ahead)
        self.ended, n_row = time.perf_counter(), flight.batch.n_row
        times = flight.began, flight.drafted, verified, sampled, self.ended
        self.stats.round(work_rows=n_row, busy=len(work), times=times)
        if all(w.job.is_decoding or w.slot.index not in self.jobs for w in work) and not any(w.is_prompt for w in work):
            live = [len(w.draft) for w in work if w.draft]
            draft_ms = 1e3 * (flight.drafted - flight.began)
            until = self.ended if ahead is None else verified  # what comes after is hidden behind the next round
            self.controller.timed(n_row, 1e3 * (until - since), len(live), max(live, default=0), draft_ms)

    def _is_on(self, flight: Flight, w: Work) -> bool:
        """Its request has not ended, nor taken another token, since it was launched."""
        return self.jobs.get(w.slot.index) is w.job and w.slot.index not in flight.off

    def _watch(self) -> None:
        """What tripped so far was the drafter's; what trips in the forward, which begins by clearing the record, is not."""
        if self.drafter is not None:
            self.draft_faults.fetch()

    def _wait(self, flight: Flight) -> Fault | None:
        """For a forward, so that a round's milliseconds are told apart by what took them. Returns what its guards say."""
        self._settle()
        with self.gpu_lock.released():  # listeners are the caller's code, and may wait for another engine
            self.on_wait()
            flight.wait()
        fault, drafting = self.faults.take(), self.draft_faults.take() if flight.is_watched else None
        if drafting is not None:  # its drafts may be wrong, which costs their rows and no text
            self.stats.guard_trips += 1
            log.warning("while drafting: %s", drafting.error(EVERYONE))
        return fault

    def _run(self, batch: Batch) -> Out:
        """All device work of a verify that does not depend on what is accepted."""
        self.faults.clear()
        out = self.target.forward(batch, self.needs.taps)
        if self.drafter is not None:
            self.drafter.absorb(batch, out)
        return out if batch.tokens.device.type == "cpu" else replace(out, best=top(out.logits))

    def _draft(self) -> tuple[list[DraftRequest], list[list[int]]]:
        """Ask the drafter for every decoding slot. A failure costs this round's drafts, nothing else."""
        jobs = [job for job in self.jobs.values() if job.is_decoding]
        picked, self.picked = self.picked, None
        if picked is None or [slot for slot, _ in picked] != [job.slot.index for job in jobs if job.slot is not None]:
            picked = self._pick(jobs)
        asks = [
            DraftRequest(job.slot, job.anchor, n)
            for job, (_, n) in zip(jobs, picked, strict=True)
            if job.slot is not None and job.anchor is not None
        ]
        if self.drafter is None or not any(n for _, n in picked):
            return asks, [[] for _ in asks]
        heard = [ask for ask in asks if ask.slot.index not in self.deaf]
        try:
            drafts = {ask.slot.index: d for ask, d in zip(heard, self.drafter.draft(heard), strict=True)}
        except SlotError as e:
            log.warning("no drafts this round: %s", e)
            self.stats.guard_trips += 1
            drafts = {}
        return asks, [drafts.get(ask.slot.index, []) for ask in asks]

    def _pick(self, jobs: Sequence[Job], taken: Sequence[int] = ()) -> list[tuple[int, int]]:
        """(slot, drafts) of the next round. `taken`: of each, the most tokens that are under way."""
        under_way = taken or [0] * len(jobs)
        caps = [(j.slot.index, self._cap(j, n)) for j, n in zip(jobs, under_way, strict=True) if j.slot is not None]
        return [(slot, n) for (slot, _), n in zip(caps, self.controller.choose(caps), strict=True)]

    def _cap(self, job: Job, taken: int) -> int:
        """Most tokens worth drafting: the bonus token comes for free, so one less than the request may still emit."""
        asked = job.request.n_draft_max
        if job.slot is not None and job.slot.index in self.deaf:
            return 0
        return max(0, min(self.needs.n_draft, job.n_left - taken - 1, self.needs.n_draft if asked is None else asked))

    def _plan(self, asks: Sequence[DraftRequest], drafts: Sequence[Sequence[int]]) -> list[Work]:
        """Rows of this forward: [anchor, drafts...] of decoding slots, then prompt chunks in what room is left."""
        work = []
        for ask, draft in zip(asks, drafts, strict=True):
            slot, job = ask.slot, self.jobs[ask.slot.index]
            draft = job.sampler.usable(draft)[: ask.n_draft]  # a wild id is never embedded
            tokens = [ask.anchor, *draft]
            seq = Seq(slot.index, slot.n_past, tokens, keep=not draft, n_out=len(tokens), n_fold=slot.n_fold)
            work.append(Work(job, slot, seq, draft))
        prompts = [job for job in self.jobs.values() if not job.is_decoding]
        n_row = self.ubatch if work else self.batch
        free = max(n_row - sum(w.seq.width for w in work), -(-n_row // PROMPT_SHARE))
        for job, n in zip(prompts, share_rows(free, [job.todo for job in prompts]), strict=True):
            slot = job.slot
            if n and slot is not None:
                end = slot.n_past + n
                chunk = job.prefill[slot.n_past : end]
                seq = Seq(slot.index, slot.n_past, chunk, True, int(end == job.n_prefill), slot.n_fold)
                work.append(Work(job, slot, seq, ()))
        return work

    def _choose(self, work: Sequence[Work], out: Out, best: Tensor | None) -> list[Chosen | None]:
        """The target's verdict on every sequence that has logits."""
        spans, at = [], 0
        for w in work:
            if w.seq.n_out:
                spans.append(Span(w.job.sampler, at, w.seq.n_out, w.draft))
                at += w.seq.n_out
        verdicts = iter(choose(out.logits, spans, synth=self.synth, best=best))
        return [next(verdicts) if w.seq.n_out else None for w in work]

    # -- commit --------------------------------------------------------------------------------------------------

    def _commit(self, flight: Flight, chosen: Sequence[Chosen | None], ahead: Flight | None) -> None:
        """Keep what was accepted; the drafter hears of it before the slots' tokens grow."""
        kept, ends = [], []
        for w, c in zip(flight.work, chosen, strict=True):
            n, finish = self._take(w, c) if self._is_on(flight, w) else (0, None)
            kept.append(n)
            ends.append(finish)
        self._observe(flight.batch, kept, flight.out)
        for w, n, finish in zip(flight.work, kept, ends, strict=True):
            if n == 0:
                continue  # it is not on any more
            w.slot.tokens.extend(w.seq.tokens[:n])
            w.slot.n_fold = 0 if w.seq.keep or ahead is not None else n  # what is ahead folds it
            if finish is not None:
                self._finish(w.job, finish)
            elif w.slot.n_past <= w.job.n_prefill:
                self._after_chunk(w)
        if ahead is not None and ahead.tokens is not None and isinstance(self.drafter, LookaheadDrafter):
            self.drafter.confirm_ahead(
                [w.slot for w in ahead.work if self._is_on(ahead, w) and w.slot.index not in self.deaf]
            )
        if not self.may_defer:
            self._settle()

    def _observe(self, batch: Batch, kept: Sequence[int], out: Out) -> None:
        """Tell the drafter what is kept. If it fails, nobody knows whom it heard of: these slots go on without drafts."""
        heard = [i for i, seq in enumerate(batch.seqs) if seq.slot not in self.deaf and kept[i]]
        if self.drafter is None or not heard:
            return
        if len(heard) < len(batch.seqs):
            starts = [*(batch.starts[i] for i in heard), batch.n_row]
            batch, kept = replace(batch, seqs=[batch.seqs[i] for i in heard], starts=starts), [kept[i] for i in heard]
        try:
            self.drafter.observe(batch, kept, out)
        except SlotError as e:
            self._deafen([self.table.slots[seq.slot] for seq in batch.seqs], e)

    def _deafen(self, slots: Sequence[Slot], error: SlotError) -> None:
        """The drafter lost track of these slots: it is not asked again for their requests, and they leave nothing more."""
        assert self.drafter is not None
        self.stats.guard_trips += 1
        log.warning("no more drafts for the requests in slots %s: %s", [slot.index for slot in slots], error)
        for slot in slots:
            self.deaf.add(slot.index)
            self.drafter.end(slot)

    def _take(self, w: Work, c: Chosen | None) -> tuple[int, End | None]:
        """Hand a job its tokens. Returns rows kept, and how the job ends if it does."""
        if not w.job.is_decoding:
            w.job.progress(w.slot.n_past + w.seq.width)
        if c is None:
            return w.seq.width, None
        if c.error is not None:
            return (w.seq.width if w.seq.keep else 1), End("error", error=c.error)
        was_decoding = w.job.is_decoding
        if was_decoding:
            self.controller.record(w.slot.index, len(w.draft), c.n_accepted)
        taken = w.job.take(c.tokens)
        self.later.append(partial(self._book, w, c, taken, was_decoding))
        # row 0 is the anchor, row i the draft i; the last token gets no row, drafted or not: what a request leaves does not
        # depend on speculation
        kept = max(1, min(taken.n_used, 1 + c.n_accepted)) if was_decoding else w.seq.width
        if taken.finish is not None:
            return kept, End(taken.finish, taken.stop)
        w.job.anchor = c.tokens[-1]
        return kept, None

    def _book(self, w: Work, c: Chosen, taken: Taken, was_decoding: bool) -> None:
        """What the next forward does not need to know of a job's round: counts, the sampler's history, the Delta."""
        n_draft = len(w.draft)
        if was_decoding:
            w.job.count(n_draft, c.n_accepted)
            self.stats.verdict(n_draft, c.n_accepted)
        self.stats.predicted_tokens += taken.n_used
        w.job.sampler.commit(c.tokens[: taken.n_used])
        w.job.tell(taken, c.logprobs or (), n_draft, c.n_accepted)

    def _settle(self) -> None:
        """Do what was put off."""
        later, self.later = self.later, []
        for do in later:
            do()

    def _after_chunk(self, w: Work) -> None:
        """A prompt chunk is in: leave it to others where a checkpoint is due, or where none is needed at the prompt's end."""
        at = w.slot.n_past
        if at in w.job.cuts or (at == w.job.n_prefill and not self.memory.needs_state):
            self._keep(w.job, w.slot)

    def _keep(self, job: Job, slot: Slot, *, whole: bool = False) -> None:
        """File what the slot has committed, unless the request or the drafter's state forbids it."""
        if not self.cache.on or not job.request.cache_prompt or slot.index in self.deaf or slot.n_past == 0:
            return
        try:
            draft = self.drafter.checkpoint(slot) if self.drafter is not None else None
        except SlotError as e:
            self._deafen([slot], e)
            return
        self.cache.keep(slot, draft, self.flush, whole=whole)

    def _finish(self, job: Job, end: End) -> None:
        """Give the slot back. What it committed stays in the cache, unless something went wrong."""
        self._settle()
        slot = job.slot
        assert slot is not None
        if end.error is None:
            self._keep(job, slot, whole=True)
        if self.drafter is not None and slot.index not in self.deaf:
            self.drafter.end(slot)
        self.deaf.discard(slot.index)
        self.jobs.pop(slot.index)
        self.table.release(slot, trusted=end.error is None)
        self.stats.finished(job, end.finish)
        if end.error is not None:
            job.sink(Failed(job.id, end.error))
            level = logging.DEBUG if isinstance(end.error, Unavailable) else logging.ERROR  # a close is no failure
            log.log(level, "request %s failed in slot %d: %s", job.id, slot.index, end.error)
        else:
            job.done(end.finish, end.stop)  # type: ignore[arg-type]
            t = job.timings()
            log.info(
                "request=%s slot=%d finish=%s prompt=%d cached=%d tokens=%d tok/s=%.1f rounds=%d mean_len=%.2f",
                *(job.id, slot.index, end.finish, job.n_prompt, job.n_cached, job.n_predicted),
                *(t.predicted_per_second, t.n_rounds, t.mean_len),
            )
        if self.is_idle:
            self.cache.check()

    # -- admission, cancel, failure ------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a job; raises QueueFull."""
        self.queue.push(job)

    def cancel(self, job: Job) -> None:
        """End a job at the next round's start, wherever it is."""
        job.cancelled = True

    def _drop_cancelled(self) -> None:
        for job in [j for j in self.jobs.values() if j.cancelled]:
            self._finish(job, End("cancelled"))
        for job in [j for j in self.queue.waiting() if j.cancelled]:
            self.queue.remove(job)
            job.done("cancelled")

    def _admit(self) -> None:
        while (job := self.queue.next(self.table)) is not None:
            request, size = job.request, self.table.page_size
            slot = self.table.pick(request.slot)
            assert slot is not None, "the queue offered a job without an idle slot"
            hit = self.cache.find(job.prefill) if request.cache_prompt else NO_HIT
            saved = self.cache.seat(slot, job.n_rows, job.prefill, hit, self._pools())
            if self.drafter is not None:
                self.drafter.begin(slot, saved)
            keeps = self.cache.on and request.cache_prompt and self.memory.needs_state
            cuts = cuts_of(job.n_prefill, size, hit.n, {hit.n_match, request.turn}, self.cache.every) if keeps else ()
            job.begin(slot, cuts)
            job.synthetic = self.synth is not None and self.drafter is not None
            self.controller.begin(slot.index)
            self.jobs[slot.index] = job
            job.sink(Started(job.id, slot.index, job.n_prompt, job.n_cached))

    def _pools(self) -> list[PartMemory]:
        """Everything that has pages: the target's layers and the drafter's."""
        drafts = self.drafter.pools() if isinstance(self.drafter, PagedDrafter) else ()
        return [*self.memory.paged, *drafts]

    def _blame(self, error: SlotError) -> None:
        """A forward refused its batch: end the slot it names, or all if it names none.

        The others lay out the same rows again, which is right because indices are checked before any state is written.
        """
        self.stats.guard_trips += 1
        guilty = [self.jobs[error.slot]] if error.slot in self.jobs else list(self.jobs.values())
        for job in guilty:
            self._finish(job, End("error", error=error))

    def abort(self, error: PyspecError) -> None:
        """The engine is going down: every request hears why."""
        self._settle()
        if self.flight is not None:
            self.flight.abandon()
        self.flight = self.picked = None
        for job in [*self.jobs.values(), *self.queue.drain()]:
            job.sink(Failed(job.id, error))
            self.stats.failed += 1
        for slot in self.table.slots:  # nothing is asked of the drafter: it may be what broke
            if slot.busy:
                self.table.release(slot, trusted=False)
        self.jobs.clear()
        self.deaf.clear()

    def flush(self, slot: Slot) -> None:
        """Fold what is pending, so that the slot's state stands at its committed length."""
        for layer in self.memory.states.values():
            flush(layer, slot.index, slot.n_fold)
        slot.n_fold = 0
