"""Two rounds in flight: the next round is planned and launched before the current one is read.

The device can compute by itself how many rows of a verify are kept (op `ahead`) if no request is cancelled or waits for a slot, and
all take the largest logit. The next round then starts right behind. Its rows are records, like rows of drafts: if a request ends
with the round before, its rows of the next round are never folded and lie beyond its committed length. A single row is stored at
once if only a token can end its request and the device sees that the token before is none of those. Otherwise it may stay a record
behind others (`waits` in engine/loop/round.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspec.cuda.ops.ahead.ref import MAX_ENDS, NO_TOKEN
from pyspec.draft.drafter import Drafter
from pyspec.engine.loop.job import Job
from pyspec.engine.loop.pending_round import PendingRound
from pyspec.engine.loop.round import Work, waits
from pyspec.sample.sampler import SlotSampler
from pyspec.sample.synth import SynthAcceptance
from pyspec.slots.batch import Seq, SeqMode
from pyspec.slots.round import Continuation


class Lookahead:
    """Decides whether and how a round continues from one that is not read yet. on: rounds are launched ahead.

    under_way   the round that was launched ahead, if any; the next step reads it
    n_late      as in Memory
    """

    def __init__(self, on: bool, max_rows: int, synth: SynthAcceptance | None, n_late: int = 0) -> None:
        self.on = on
        self.max_rows = max_rows
        self.synth = synth
        self.n_late = n_late
        self.under_way: PendingRound | None = None

    def take(self) -> PendingRound | None:
        """Hand over the round that was launched ahead; None if there is none."""
        taken, self.under_way = self.under_way, None
        return taken

    def can_pipeline(self, w: Work) -> bool:
        """The request continues for every verdict, unless it ends, and the device can compute how far."""
        job, width = w.job, w.seq.width
        return (
            job.is_decoding
            and w.seq.n_out == width
            and job.n_left > width
            and takes_the_best(job.sampler)
            and (job.constraint is None or job.constraint.is_calm)
            and (width == 1 or self._knows_ends(job))
        )

    def plan(
        self,
        work: Sequence[Work],
        n_drafts: Sequence[int],
        drafter: Drafter | None,
        refused: tuple[int, ...] = (),
    ) -> tuple[list[Seq], Continuation] | None:
        """Plan the next round's rows as if no row of this round were kept. None: the host has to read first.

        refused  rows of `work` whose drafts a grammar refuses
        """
        if any(n_drafts) and not (drafter is not None and drafter.runs_ahead):
            return None
        if sum(n_drafts) + len(work) > self.max_rows:
            return None
        if refused and self.synth is not None:
            return None  # coins decide acceptance there
        modes = [
            SeqMode.VERIFY if n else self._single_mode(w) for w, n in zip(work, n_drafts, strict=True)
        ]
        ends, forced = None, None
        if SeqMode.KEEP in modes or any(w.seq.width > 1 for w in work):
            ends = tuple(e if len(e := self._ends_of(w.job)) <= MAX_ENDS else frozenset() for w in work)
            if self.synth is not None:
                forced = tuple(self._coins(self.synth, w) for w in work)
        seqs = [
            Seq(
                *(w.slot.index, w.slot.n_past, [0] * (1 + n), mode, 1 + n, w.seq.n_recorded(1)),
                slack=w.seq.width,
                shift=w.slot.shift,
            )
            for w, n, mode in zip(work, n_drafts, modes, strict=True)
        ]
        return seqs, Continuation(ends, forced, tuple(n_drafts) if any(n_drafts) else (), refused)

    def can_follow(self, w: Work) -> bool:
        """The part reads a prompt to its end, and the request goes on with the largest logit unless it ends."""
        job, seq = w.job, w.seq
        return (
            not job.is_decoding
            and not seq.images
            and seq.keep
            and seq.n_out == 1
            and not w.n_scored
            and seq.n_past + seq.width == job.n_prefill
            and job.n_left > 1
            and takes_the_best(job.sampler)
            and job.constraint is None
        )

    def plan_behind(
        self, prompt: Job, jobs: Sequence[Job], n_drafts: Sequence[int]
    ) -> tuple[list[Seq], Continuation] | None:
        """Plan the rows of all `jobs` behind the prompt of one of them, whose rows are committed; the others' tokens are known. Each is laid
        out one position before its place. None: they are too many."""
        if sum(n_drafts) + len(jobs) > self.max_rows:
            return None
        seqs, known = [], []
        for job, n in zip(jobs, n_drafts, strict=True):
            slot = job.slot
            assert slot is not None
            mode = SeqMode.VERIFY
            if not n and waits(slot, slot.n_past, slot.n_fold, self.n_late):
                mode = SeqMode.LATE
            elif not n and job is not prompt:  # its state may still be kept as that of the prompt's end
                mode = SeqMode.KEEP
            known.append(NO_TOKEN if job is prompt else job.anchor or 0)
            seqs.append(
                Seq(
                    *(slot.index, slot.n_past - 1, [0] * (1 + n), mode, 1 + n, slot.n_fold),
                    slack=1,
                    shift=slot.shift,
                )
            )
        drafts = tuple(n_drafts) if any(n_drafts) else ()
        return seqs, Continuation((self._ends_of(prompt),), None, drafts, known=tuple(known))

    def _single_mode(self, w: Work) -> SeqMode:
        """The mode of a request's next single row. Behind drafts it is never late: the number of records is unknown."""
        if w.seq.width == 1 and waits(w.slot, w.slot.n_past + 1, w.seq.n_recorded(1), self.n_late):
            return SeqMode.LATE
        return SeqMode.KEEP if self._ends_by_token(w.job) else SeqMode.VERIFY

    def _ends_by_token(self, job: Job) -> bool:
        """Only a token that the device knows can end the job. Under a grammar any token may be the last, or refused."""
        return job.constraint is None and self._knows_ends(job)

    def _knows_ends(self, job: Job) -> bool:
        """The device knows every token that can end the job. A draft never contains a token that ends its grammar."""
        request = job.request
        return not request.stop and request.max_predict_ms <= 0 and len(self._ends_of(job)) <= MAX_ENDS

    def _ends_of(self, job: Job) -> frozenset[int]:
        """Tokens that the host must look at: the request may end, or take another token."""
        more = job.sampler.eog_ids if self.synth is not None else frozenset()
        return job.sampler.ends | job.sampler.bias_ids | more

    @staticmethod
    def _coins(synth: SynthAcceptance, w: Work) -> int:
        sampler = w.job.sampler
        return synth.n_accepted(sampler.fingerprint, sampler.n_history, w.seq.width - 1)


def takes_the_best(sampler: SlotSampler) -> bool:
    """True if the next token has the largest logit, unless it is banned: the device knows it before the host."""
    edits = sampler.edits_logits and not sampler.only_bans
    is_free = sampler.budget is None or sampler.budget.is_far
    return sampler.params.greedy and not edits and sampler.params.logprobs is None and is_free
