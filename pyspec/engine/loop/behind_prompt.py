"""The round behind a prompt that runs alone, launched while the device reads that prompt.

The other requests rest, so all their tokens are known. All rows of a prompt are kept, whatever its first token is: the drafter
observes them and the slot has them at once (`Committer.settle`). Only that token is missing, and the device has it (`Continuation.known`).
The next round is another prompt alone, or one of all requests that decode, the new one among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pyspec.device.worker import Launched
from pyspec.engine.loop.commit import Committer
from pyspec.engine.loop.job import Job
from pyspec.engine.loop.lookahead import Lookahead, takes_the_best
from pyspec.engine.loop.pending_round import PendingRound
from pyspec.engine.loop.pictures import Pictures
from pyspec.engine.loop.round import RowLimits, Work, logits_need, plan_work
from pyspec.engine.policy.plan import RoundPlan, RoundState
from pyspec.slots.round import Continuation, plan_round

ON = True  # else the host reads a prompt before it launches the next round


class BehindPrompt:
    """Launches such rounds. Arguments: the loop's."""

    def __init__(self, committer: Committer, lookahead: Lookahead, pictures: Pictures) -> None:
        self.committer, self.worker, self.speculator = committer, committer.worker, committer.speculator
        self.lookahead, self.pictures = lookahead, pictures

    def follows(self, pending: PendingRound, jobs: Mapping[int, Job]) -> bool:
        """The round is of this kind: a prompt alone, read to its end, for which others rest. jobs: by slot."""
        if not ON or len(pending.work) != 1 or len(jobs) < 2:
            return False
        (w,) = pending.work
        return pending.still_running(w, jobs) and self.lookahead.can_follow(w)

    def launch(
        self,
        pending: PendingRound,
        jobs: Mapping[int, Job],
        limits: RowLimits,
        clock: Callable[[], float],
    ) -> PendingRound | None:
        """Launch the next round. None: the host has to read the prompt first. clock: seconds, the loop's"""
        prompt, speculator = pending.work[0].job, self.speculator
        decoding = [job for job in jobs.values() if job.is_decoding or job is prompt]
        reading = [job for job in jobs.values() if not (job.is_decoding or job is prompt)]
        speculator.controller.n_paused = 0
        if reading:
            make = partial(self._plan, decoding, reading, clock(), pending.work[0].seq.width)
            planned = speculator.decide("the plan of a round", make, None)
            if planned is None:
                return None
            made = planned[1]
            speculator.controller.n_paused = len(made.paused)
            if made.alone is not None:
                speculator.decide("the plan of a round", lambda: speculator.take(*planned), None)
                return self._launch_prompt(pending, reading[made.alone], limits, clock)
            if len(made.paused) < len(reading):
                return None
        return self._launch_decoding(pending, decoding, clock)

    def _plan(
        self, decoding: Sequence[Job], reading: Sequence[Job], now: float, n_under_way: int
    ) -> tuple[RoundState, RoundPlan]:
        """The plan of the next round, not taken yet."""
        state = self.speculator.state(decoding, reading, now=now, n_under_way=n_under_way)
        return state, self.speculator.controller.plan(state)

    def _launch_prompt(
        self, pending: PendingRound, alone: Job, limits: RowLimits, clock: Callable[[], float]
    ) -> PendingRound | None:
        """Another prompt alone."""
        self.committer.settle(pending)
        work = plan_work([alone], {}, limits, self.worker.memory.n_late)
        seqs, reads, sent = [w.seq for w in work], logits_need(work), clock()

        def launch() -> Launched:
            self.pictures.bring(work)
            return self.worker.launch(plan_round(self.worker.table, seqs, reads=reads))

        launched = self.speculator.launched(launch)
        if launched is None:
            return None
        pending.next = Continuation(known=())
        return PendingRound(work, launched, 0.0, 0.0, sent=sent, is_behind=True, is_known=True)

    def _launch_decoding(
        self, pending: PendingRound, jobs: Sequence[Job], clock: Callable[[], float]
    ) -> PendingRound | None:
        """A round of all requests that decode, with drafts that the device makes."""
        prompt, speculator = pending.work[0].job, self.speculator
        if speculator.has_offers(job for job in jobs if job is not prompt):
            return None
        self.committer.settle(pending)
        n_drafts = speculator.plan_ahead(jobs, [int(job is prompt) for job in jobs])
        drafter = speculator.drafter
        runs_ahead = drafter is not None and drafter.runs_ahead
        if any(n_drafts) and not (runs_ahead and all(map(self._may_draft, jobs))):
            return None
        planned = self.lookahead.plan_behind(prompt, jobs, n_drafts)
        if planned is None:
            return None
        seqs, behind = planned
        then = [Work(job, job.slot, seq) for job, seq in zip(jobs, seqs, strict=True) if job.slot]
        sent = clock()
        launched = self.speculator.launched(
            lambda: self.worker.launch_behind(
                pending.launched, plan_round(self.worker.table, seqs, behind, reads=logits_need(then))
            )
        )
        if launched is None:
            return None
        pending.next, speculator.planned = behind, None
        return PendingRound(then, launched, began=0.0, drafted=0.0, sent=sent, is_behind=True)

    def _may_draft(self, job: Job) -> bool:
        """Its drafts may be made before the host sees them."""
        slot, speculator = job.slot, self.speculator
        if slot is None or not speculator.follows(slot.index) or not speculator.read.may_draft(slot):
            return False
        return (job.constraint is None or job.constraint.is_calm) and takes_the_best(job.sampler)
