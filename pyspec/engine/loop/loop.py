"""The loop: one round drafts, verifies, accepts and commits for every busy slot. Open this file first.

`step_plain` runs the parts of a round one after the other. `step_ahead` runs the same parts with two rounds in flight. Each part
is one idea in its own file. The loop runs on one thread and knows no drafter or architecture by name. A failure ends the
requests that caused it; only a failure of the device is raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from pyspec.cuda.faults import Fault
from pyspec.device.worker import Worker, is_device_error
from pyspec.draft.drafter import Drafter
from pyspec.draft.suffix_drafts import SuffixDrafts
from pyspec.engine.loop.admission import Admission
from pyspec.engine.loop.behind_prompt import BehindPrompt
from pyspec.engine.loop.commit import Committer
from pyspec.engine.loop.disk_tier import DiskTier
from pyspec.engine.loop.expert_cache import ExpertCache
from pyspec.engine.loop.grammar_turns import Turns
from pyspec.engine.loop.job import End, Job, blamed
from pyspec.engine.loop.lookahead import Lookahead
from pyspec.engine.loop.pending_round import PendingRound
from pyspec.engine.loop.pictures import Pictures
from pyspec.engine.loop.round import RowLimits, Work, logits_need, plan_work
from pyspec.engine.loop.slot_actions import run_task
from pyspec.engine.loop.slot_image import SlotImager
from pyspec.engine.loop.slot_task import SlotTask
from pyspec.engine.loop.speculator import Speculator
from pyspec.engine.loop.stats import Stats
from pyspec.engine.loop.status import metrics_of, slot_rows
from pyspec.engine.policy.controller import Controller
from pyspec.engine.policy.plan import PromptRules
from pyspec.engine.policy.queue import Queue
from pyspec.engine.policy.row_costs import Brought, RoundExperts
from pyspec.errors import PyspecError, SlotError
from pyspec.models.target import Target
from pyspec.repeats import limited
from pyspec.request import Failed, Metrics, SlotInfo
from pyspec.sample.choose import Chosen, Span, best_masked, choose, fill_masked, wants_mask
from pyspec.sample.mask import SpanMask, fill_all
from pyspec.sample.synth import SynthAcceptance
from pyspec.slots.arena import BUCKETS
from pyspec.slots.batch import Seq
from pyspec.slots.cache import PrefixCache
from pyspec.slots.drafts import Drafts
from pyspec.slots.images import spans_of
from pyspec.slots.memory import Memory
from pyspec.slots.prefix import NOT_KNOWN
from pyspec.slots.round import Continuation, plan_round

log = limited(__name__)


class Loop:
    """Owns the worker, slots and queue, the speculator, statistics, and the jobs.

    plain  run rounds one after the other, without graphs: slow, and the first thing to try when a text looks wrong
    limits  rows of a forward; of one with decoding slots plans decide, by `rules`
    clock  seconds; every decision by time uses it
    """

    def __init__(
        self,
        worker: Worker,
        controller: Controller,
        cache: PrefixCache,
        limits: RowLimits,
        queue_limit: int,
        *,
        synth: SynthAcceptance | None = None,
        plain: bool = False,
        rules: PromptRules | None = None,
        suffixes: SuffixDrafts | None = None,
        pictures: Pictures | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.worker = worker
        self.pictures = pictures or Pictures(worker, None)
        self.cache = cache
        self.limits = limits
        self.clock = clock
        self.table = worker.table
        self.queue: Queue[Job] = Queue(queue_limit)
        self.jobs: dict[int, Job] = {}  # by slot, in order of arrival
        self.stats = Stats(controller.n_max)
        self.speculator = Speculator(worker, controller, self.stats, suffixes, clock)
        is_async = (
            worker.device.type != "cpu" and not plain
        )  # a CPU's forward is over when the call returns
        shared = self.jobs, worker, self.speculator, cache, self.stats
        self.committer = Committer(*shared, defers=is_async)
        self.admission = Admission(self.queue, *shared, self.pictures)
        self.admission.synthetic = synth is not None and worker.drafter is not None
        most = BUCKETS[-1] if worker.arena is None else worker.arena.n_row
        self.lookahead = Lookahead(
            is_async and worker.arena is not None, most, synth, worker.memory.n_late
        )
        rows = limits.decoding
        controller.rules = rules or PromptRules(rows, rows, n_free=limits.prompts)
        self.turns = Turns(clock)
        self.behind = BehindPrompt(self.committer, self.lookahead, self.pictures)
        self.awake: list[Job] = []  # jobs that take part in this round
        self.slot_tasks: list[SlotTask] = []  # each runs once its slot is idle
        # deliver events; called while the GPU is busy, or when nothing waits for it
        self.on_wait: Callable[[], None] = lambda: None
        self.disk: DiskTier | None = None
        # of an engine that may be parked (parking.py): its MovableMemory, and the content of pages while it is
        self.movable: Any = None
        self.kept_pages: list[Any] = []
        self.experts: ExpertCache | None = None
        self.committer.on_first, self.committer.on_leave = self._hand_out, self.queue.leave
        self.raises_bugs = False  # re-raise unexpected exceptions so the supervisor restarts the process
        # when the last forward's results arrived, and when its round ended
        self.landed = self.ended = 0.0

    # -- the round -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Run one round for every busy slot."""
        with self.worker.lock:
            try:
                if self.lookahead.on:
                    self.step_ahead()
                else:
                    self.step_plain()
                self.pictures.hide_computed(self.jobs.values())
                self.pictures.step(is_alone=not self.jobs)
                if self.disk is not None:
                    self.disk.step()
            except Exception as e:
                if is_device_error(e) or self.raises_bugs:
                    raise
                self._survive(e)

    def step_plain(self) -> None:
        """Admit, draft as planned, lay out, run, choose, commit."""
        self.admit()
        if not self.jobs:
            return
        began, drafts = self.clock(), self.draft()
        pending = self.run(self.lay_out(drafts), began)
        if pending is not None:
            fault = self.wait(pending)
            self.commit(pending, self.choose(pending), fault)

    def step_ahead(self) -> None:
        """The same, but launch the next round before reading this one, if it needs no result of this one."""
        pending = self.lookahead.take()
        if pending is not None and self.needs_sync():
            self.read(pending, None)
            pending = None
        if pending is None:
            self.admit()
            if not self.jobs:
                return
            began, drafts = self.clock(), self.draft()
            pending = self.run(self.lay_out(drafts), began)
        if pending is not None:
            self.lookahead.under_way = self.launch_next(pending)
            self.speculator.count_beside(pending.launched, len(pending.work))
            self.read(pending, self.lookahead.under_way)

    def read(self, pending: PendingRound, ahead: PendingRound | None) -> None:
        """Wait for a round, choose and commit. ahead: the next round, if it is launched already."""
        fault = self.wait(pending)
        if pending.running(self.jobs):  # else every request ended with the round before
            self.commit(pending, self.choose(pending), fault, ahead)

    # -- its parts -----------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Drop cancelled requests, then admit waiting ones."""
        for job in [j for j in self.jobs.values() if j.cancelled]:
            self.committer.finish(job, End("cancelled"))
        if self.slot_tasks:
            self._run_slot_tasks()
        self.admission.update()
        if (long := self.admission.in_the_way()) is not None:
            self.committer.suspend(long)
            self.admission.update()  # admits the short request
            self.queue.put_back(long)
        while self.admission.ready:
            self._start(*self.admission.ready.pop(0))

    def _start(self, job: Job, logits: Tensor) -> None:
        """Choose a request's first token from logits that the cache kept. No forward runs."""
        mask = None if job.constraint is None else SpanMask(job.constraint, ())
        try:
            (chosen,) = choose(logits, [Span(job.sampler, 0, 1, mask=mask)], synth=self.lookahead.synth)
        except Exception as e:
            if is_device_error(e):
                raise
            log.exception("request %s could not begin", job.id)
            chosen = Chosen([], 0, error=SlotError(str(blamed(e))))
        self.committer.start(job, chosen)

    def draft(self) -> dict[int, Drafts]:
        """Plan the round, and draft by slot."""
        jobs, decide = list(self.jobs.values()), self.speculator.decide
        jobs = decide("the turns of grammars", lambda: self.turns.awake(jobs), jobs)
        made, self.awake = self.speculator.plan(jobs, self.clock())
        self.limits = replace(self.limits, decoding=made.rows or self.limits.decoding)
        decoding = [job for job in self.awake if job.is_decoding]
        return self.speculator.draft(decoding, made) if decoding else {}

    def lay_out(self, drafts: dict[int, Drafts]) -> list[Work]:
        """The rows of this forward."""
        return plan_work(self.awake, drafts, self.limits, self.worker.memory.n_late)

    def run(self, work: Sequence[Work], began: float) -> PendingRound | None:
        """Launch the round. Returns None if it was rejected; the request at fault has ended."""
        drafted = self.clock()
        try:
            self.pictures.bring(work)
            round_ = plan_round(self.table, [w.seq for w in work], reads=logits_need(work))
            launched = self.worker.launch(round_)
        except SlotError as e:
            self.worker.draft_faults.fetched.clear()
            self.committer.blame(e)
            return None
        return PendingRound(work, launched, began, drafted, sent=drafted, asked=self.speculator.asked)

    def launch_next(self, pending: PendingRound) -> PendingRound | None:
        """Launch the next round before this one is read, if the same requests continue with any result."""
        waits = (
            self.controller.is_pause_over or self.turns.n_slow or self.needs_sync()
        )  # its end decides
        if not waits and self.behind.follows(pending, self.jobs):
            return self.behind.launch(pending, self.jobs, self.limits, self.clock)
        planned = None if waits or not self._goes_on(pending) else self._plan_behind(pending)
        return None if planned is None else self._launch_behind(pending, *planned)

    def _goes_on(self, pending: PendingRound) -> bool:
        """Whether the next round has the requests of this one, whatever its results are, and no better drafts than the drafter's."""
        work = pending.work
        return (
            len(work) + self.controller.n_paused == len(self.jobs)
            and len(pending.running(self.jobs)) == len(work)
            and all(map(self.lookahead.can_pipeline, work))
            and not self.speculator.has_offers(w.job for w in work)
        )

    def _plan_behind(self, pending: PendingRound) -> tuple[list[Seq], Continuation] | None:
        """The rows of the next round with the lengths of its drafts, and how they continue this one. None: the device can not draft them."""
        work, speculator = pending.work, self.speculator
        n_drafts = speculator.plan_ahead([w.job for w in work], [w.seq.width for w in work])
        if any(n_drafts) and not all(speculator.follows(w.slot.index) for w in work):
            return None
        return self.lookahead.plan(work, n_drafts, speculator.drafter, pending.refuse(self.jobs))

    def _launch_behind(
        self, pending: PendingRound, seqs: list[Seq], behind: Continuation
    ) -> PendingRound | None:
        """The next round, launched; None if that failed, or if its drafter needs the host."""
        work, sent, pending.next = pending.work, self.clock(), behind
        reads = logits_need(work)
        launched = self.speculator.launched(
            lambda: self.worker.launch_behind(
                pending.launched, plan_round(self.table, seqs, behind, reads=reads)
            )
        )
        if launched is None:
            pending.next = None
            return None
        self.speculator.planned = None
        then = [Work(w.job, w.slot, seq) for w, seq in zip(work, seqs, strict=True)]
        return PendingRound(then, launched, began=0.0, drafted=0.0, sent=sent, is_behind=True)

    def needs_sync(self) -> bool:
        """True if some pending work needs the previous round's results."""
        leaves = any(job.cancelled for job in (*self.jobs.values(), *self.queue.waiting()))
        if self.slot_tasks and any(not self.table.slots[t.slot].busy for t in self.slot_tasks):
            return True
        if leaves or not self.jobs or self.queue.first(self.table) is not None:
            return True
        return self.admission.is_turn_over or self.admission.has_restored

    def wait(self, pending: PendingRound) -> Fault | None:
        """Wait for the forward and return its fault record."""
        self.committer.flush_deferred()
        with self.worker.lock.released():  # listeners are the caller's, and may wait for another engine
            self.on_wait()
            if pending.is_behind:
                pending.refuse(self.jobs)
                pending.fill_tokens(self.ended)
            pending.find_spans()
            if self.may_defer:  # masks of greedy rows wait until a token is refused
                fill_all(s.mask for s in pending.spans if s.mask is not None and wants_mask(s))
        masked = self.ask_masked(pending)
        # after everything that a client waits for
        while not pending.launched.is_over and (self.speculator.enter_piece() or not self._make_ready()):
            pass
        with self.worker.lock.released():
            pending.launched.wait()
        if masked is not None:
            fill_masked(*masked)
        fault = self.worker.faults.take()
        if pending.is_watched:
            self.speculator.take_faults()
        pending.land(self.clock(), self.landed)
        self.landed = pending.arrived
        pending.is_first = self.worker.has_recorded()
        if self.worker.experts is not None:
            self.speculator.decide("the use of experts", lambda: self._count_experts(pending), None)
        self.speculator.decide("the pace of prompts", lambda: self._count_prompts(pending), None)
        return fault

    def _count_experts(self, pending: PendingRound) -> None:
        """Read the experts that a round used, and tell their cache."""
        log = self.worker.experts
        assert log is not None
        is_prompt = [w.is_prompt for w in pending.work]
        n_decoding = is_prompt.index(True) if True in is_prompt else len(is_prompt)
        pending.experts = log.used(pending.launched.log, pending.batch_starts, n_decoding)
        if self.experts is not None and pending.experts is not None:
            n_row, costs = pending.launched.batch.n_row, self.controller.costs
            is_known = costs.verify.knows(n_row) and not pending.is_first
            took = 1e3 * (self.landed - pending.since)
            self.experts.landed(pending.experts, took, costs.verify(n_row) if is_known else 0.0)

    def _count_prompts(self, pending: PendingRound) -> None:
        """Report the time of a round that may have read prompts."""
        if self.controller.force is None:
            others = len(self.jobs) > len(pending.work)
            pending.count(self.controller, 1e3 * (self.landed - pending.since), others=others)

    def _hand_out(self) -> None:
        with self.worker.lock.released():  # listeners are the caller's, and may wait for another engine
            self.on_wait()

    def ask_masked(self, pending: PendingRound) -> tuple[list[Span], Tensor] | None:
        """Also compute the masked argmax on the GPU if a mask was needed recently.

        Skipped once the next round is launched, because the result would arrive after that round.
        """
        if pending.next is not None or not self.may_defer:
            return None
        spans, found = best_masked(pending.launched.out.logits, pending.spans)
        return None if found is None else (spans, self.worker.bring(pending.launched, found))

    def choose(self, pending: PendingRound) -> list[Chosen | None]:
        """Return the target's verdict on every sequence that has logits."""
        return pending.choose(self.jobs, self.lookahead.synth)

    def commit(
        self,
        pending: PendingRound,
        chosen: list[Chosen | None],
        fault: Fault | None,
        ahead: PendingRound | None = None,
    ) -> None:
        """Make verdicts final, and report the round's time to the controller."""
        if ahead is not None:
            chosen, ahead.off = pending.reconcile(chosen)
        elif not pending.is_settled:
            pending.launched.copy_results(self.worker.plan, is_next_launched=False)
        if fault is not None:
            self.stats.guard_trips += 1
            chosen = pending.fail_slot(fault, chosen)
        work, sampled = pending.running(self.jobs), self.clock()
        self.committer.commit(pending, chosen, ahead)
        self.ended, n_row = self.clock(), pending.launched.batch.n_row
        self.stats.round(
            busy=len(work), times=(pending.began, pending.drafted, pending.arrived, sampled, self.ended)
        )
        count = partial(self._count_round, pending, work, chosen, n_row, is_last=ahead is None)
        self.speculator.decide("the times of rounds", count, None)

    def _count_round(
        self,
        pending: PendingRound,
        work: Sequence[Work],
        chosen: Sequence[Chosen | None],
        n_row: int,
        *,
        is_last: bool,
    ) -> None:
        """Report a committed round of so many rows to the policies. work: of requests that ran at its begin; is_last: no other is launched."""
        both = zip(pending.work, chosen, strict=True)
        self.controller.gave(len(c.tokens) for w, c in both if c and not w.is_prompt)
        is_other = pending.is_first or any(w.is_prompt for w in work)
        if is_other or not all(w.job.is_decoding or w.slot.index not in self.jobs for w in work):
            self.controller.timed_beside(1e3 * (self.ended - pending.since))
            return
        live = pending.asked or [
            len(w.draft) for w in work if w.draft and w.slot.index not in self.controller.offered
        ]
        until = self.ended if is_last else pending.arrived  # the next round hides the rest
        took, draft_ms = 1e3 * (until - pending.since), 1e3 * (pending.drafted - pending.began)
        use, slots = pending.experts, [w.slot.index for w in pending.work]
        brought = None
        if use is not None:
            total = Brought(use.misses, use.hits)
            brought = RoundExperts.of(slots, use.row_misses, use.row_hits, total)
        self.controller.timed(n_row, took, len(live), max(live, default=0), draft_ms, brought)

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def target(self) -> Target:
        return self.worker.target

    @property
    def memory(self) -> Memory:
        return self.worker.memory

    @property
    def drafter(self) -> Drafter | None:
        return self.worker.drafter

    @property
    def controller(self) -> Controller:
        return self.speculator.controller

    @property
    def may_defer(self) -> bool:
        """Events of a round may be delivered while the device runs the next one."""
        return self.committer.defers

    @property
    def is_idle(self) -> bool:
        copies = self.disk is not None and self.disk.has_work
        return not (copies or self.is_busy or len(self.queue) or self.slot_tasks)

    @property
    def is_busy(self) -> bool:
        return bool(self.jobs or self.admission.restoring)

    @property
    def n_slot(self) -> int:
        return len(self.table.slots)

    @property
    def n_row(self) -> int:
        """Rows of all pages."""
        return self.table.n_row

    @property
    def n_draft_max(self) -> int:
        """The longest draft; 0: no drafter."""
        return self.worker.n_draft

    @property
    def queue_limit(self) -> int:
        """Requests that may wait."""
        return self.queue.limit

    @property
    def next_rows(self) -> int:
        """Rows of the next round, estimated."""
        waiting = sum(job.n_prefill for job in self.queue.waiting())
        reading = (job for job in self.jobs.values() if not job.is_decoding and job.slot is not None)
        n = waiting + sum(job.n_prefill - job.slot.n_past for job in reading if job.slot is not None)
        return max(len(self.jobs), min(self.limits.prompts, n), 1)

    def submit(self, job: Job) -> None:
        """Queue a job, unless it is over already. If it has to wait, its place depends on what is cached of its prompt."""
        if (finish := job.spent) is not None:
            self.stats.finished(job, finish)
            job.done(finish, job.resumed_stop)
            return
        if job.request.images:
            spans = spans_of(job.request.images, self.table.handles)
            job.see(spans, are_whole=self.pictures.are_whole)
            self.pictures.has_news = True
        waits = len(self.queue) > 0 or all(slot.busy for slot in self.table.slots)
        salt, looks = job.request.cache_salt, waits and job.reuses
        self.queue.push(job, self.cache.known(job.prefill, salt) if looks else NOT_KNOWN)

    def reject(self, job: Job, error: PyspecError) -> None:
        """Fail a job that is not queued."""
        job.sink(Failed(job.id, error))
        self.stats.requests_failed += 1

    def add_slot_task(self, task: SlotTask) -> None:
        """Run a task between two rounds, once its slot is idle."""
        self.slot_tasks.append(task)

    def slot_rows(self, n_ctx: int) -> list[SlotInfo]:
        """One row per slot. Safe to call from any thread."""
        jobs = self.jobs | self.admission.restoring_jobs
        return slot_rows(self.table, jobs, self.speculator, n_ctx)

    def metrics(self, n_unqueued: int = 0) -> Metrics:
        """Counters and gauges. n_unqueued: requests that wait outside the queue. Safe to call from any thread."""
        n, queued = len(self.jobs) + len(self.admission.restoring), len(self.queue) + n_unqueued
        n_byte = self.speculator.suffixes.n_bytes
        return metrics_of(self.stats, self.cache, self.disk, n, queued, n_byte, self.experts)

    def imager(self) -> SlotImager:
        """An imager of idle slots, for the engine's thread."""
        return SlotImager(self.worker, self.cache, self.disk)

    def use_disk(self, disk: DiskTier | None) -> None:
        """From now on the prefix cache has a tier on disk, or none."""
        self.disk = self.committer.disk = self.admission.disk = self.speculator.read.disk = disk

    def leave(self) -> None:
        """Let go of the other ranks. Nothing runs after that."""
        self.pictures.rest()
        self.worker.leave()

    def cancel(self, job: Job) -> None:
        """End a job at the next round's start."""
        job.cancelled = True

    def check(self) -> None:
        """Check the invariants that hold between rounds. It reads every page, so call it when no request waits."""
        with self.worker.lock:
            while not self._make_ready():
                pass
        self.cache.check()

    def _make_ready(self) -> bool:
        """Move one piece of state to the host to make room for the next request. Returns True if there is room."""
        return self.worker.device.type == "cpu" or self.cache.make_ready()

    def _run_slot_tasks(self) -> None:
        """Run tasks of idle slots, before a request is admitted there."""
        tasks, self.slot_tasks = self.slot_tasks, []  # a task that fails is not tried again
        self.slot_tasks += [task for task in tasks if not run_task(task, self.table)]

    def _survive(self, error: Exception) -> None:
        """A bug, or no memory: the guilty request is unknown, so all seated requests end and new ones may come."""
        log.exception("a round failed; its requests end with it")
        self._abandon()
        self.worker.forget_round()
        slots = [job.slot for job in self.jobs.values() if job.slot is not None]
        if not slots:  # then a waiting request caused it, and would cause it again
            self._turn_away(blamed(error))
        self.admission.drop_restoring(blamed(error))
        self.committer.drop_all(blamed(error))
        self.speculator.forget(slots)

    def _abandon(self) -> None:
        if (pending := self.lookahead.take()) is not None:
            pending.launched.abandon()

    def _turn_away(self, error: PyspecError) -> None:
        """Fail everything that waits for a slot."""
        for job in self.queue.drain():
            self.queue.leave(job)
            self.reject(job, error)
        tasks, self.slot_tasks = self.slot_tasks, []
        for task in tasks:
            task.failed(error)

    def abort(self, error: PyspecError) -> None:
        """Fail every request: the engine is going down."""
        self._abandon()
        self.admission.drop_restoring(error)
        self.committer.drop_all(error)
        self.speculator.lost_track.clear()
        self._turn_away(error)
