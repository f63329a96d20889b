"""Two rounds in flight: the next one is planned and launched before the one that is under way has been read.

Where nobody is cancelled, waits for a slot, or samples otherwise than by the largest logit, the device can tell by itself how far a
verify is kept (op `ahead`), so that the next round starts behind it at once. Its rows are records, as those of drafts: should a
request end with the round before, its rows of this one are never folded, and lie beyond what the slot committed. A single row
of a request that can only end by a token is kept at once, if the device sees that the token before it is none of those, or left as one
more record behind others (`waits` in engine/loop/round.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspec.cuda.ops.ahead.ref import MAX_ENDS
from pyspec.draft.drafter import Drafter, LookaheadDrafter
from pyspec.engine.loop.job import Job
from pyspec.engine.loop.pending_round import PendingRound
from pyspec.engine.loop.round import Work, waits
from pyspec.sample.sampler import SlotSampler
from pyspec.sample.synth import SynthAcceptance
from pyspec.slots.batch import Seq
from pyspec.slots.round import Continuation


class Lookahead:
    """Says whether a round can go on from one that has not been read, and how. `on`: rounds are launched that way.

    under_way   the round that was, if any: the next step reads it
    n_late      Memory's
    """

    def __init__(self, on: bool, max_rows: int, synth: SynthAcceptance | None, n_late: int = 0) -> None:
        self.on, self.max_rows, self.synth, self.n_late = on, max_rows, synth, n_late
        self.under_way: PendingRound | None = None

    def take(self) -> PendingRound | None:
        """The round that is under way, which is the caller's from here on; None if there is none."""
        taken, self.under_way = self.under_way, None
        return taken

    def can_pipeline(self, w: Work) -> bool:
        """Whatever the verdict is, this request goes on behind it, unless it ends there; and the device can tell how far."""
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
        self, work: Sequence[Work], n_drafts: Sequence[int], drafter: Drafter | None, refused: tuple[int, ...] = ()
    ) -> tuple[list[Seq], Continuation] | None:
        """The rows of the round behind that of `work`, as if nothing of it were kept. None: the host has to be asked.

        refused  rows of `work` whose tokens are none
        """
        if (any(n_drafts) and not isinstance(drafter, LookaheadDrafter)) or sum(n_drafts) + len(work) > self.max_rows:
            return None
        if refused and self.synth is not None:
            return None  # coins say what is right there
        lates = [n == 0 and self._waits(w) for w, n in zip(work, n_drafts, strict=True)]
        singles = [n == 0 and not late for n, late in zip(n_drafts, lates, strict=True)]
        keeps = [single and self._ends_by_token(w.job) for w, single in zip(work, singles, strict=True)]
        ends, forced = None, None
        if any(keeps) or any(w.seq.width > 1 for w in work):
            ends = tuple(e if len(e := self._ends_of(w.job)) <= MAX_ENDS else frozenset() for w in work)
            if self.synth is not None:
                forced = tuple(self._coins(self.synth, w) for w in work)
        seqs = [
            Seq(w.slot.index, w.slot.n_past, [0] * (1 + n), keep, 1 + n, _to_fold(w.seq), w.seq.width, late)
            for w, n, keep, late in zip(work, n_drafts, keeps, lates, strict=True)
        ]
        return seqs, Continuation(ends, forced, tuple(n_drafts) if any(n_drafts) else (), refused)

    def _waits(self, w: Work) -> bool:
        """Its next row, if that is a single one: behind drafts nobody knows yet how many records there are."""
        return w.seq.width == 1 and waits(w.slot, w.slot.n_past + 1, _to_fold(w.seq), self.n_late)

    def _ends_by_token(self, job: Job) -> bool:
        """As far as it is not known before: and the device knows by which. Under a grammar any token may be the last, or refused."""
        return job.constraint is None and self._knows_ends(job)

    def _knows_ends(self, job: Job) -> bool:
        """No draft that it keeps ends it but those that the device knows: one that a grammar ends with is not drafted."""
        request = job.request
        return not request.stop and request.max_predict_ms <= 0 and len(self._ends_of(job)) <= MAX_ENDS

    def _ends_of(self, job: Job) -> frozenset[int]:
        """Behind these the host decides: the request may end, or take another token."""
        more = job.sampler.eog_ids if self.synth is not None else frozenset()
        return job.sampler.ends | job.sampler.bias_ids | more

    @staticmethod
    def _coins(synth: SynthAcceptance, w: Work) -> int:
        sampler = w.job.sampler
        return synth.n_accepted(sampler.fingerprint, sampler.n_history, w.seq.width - 1)


def _to_fold(seq: Seq) -> int:
    """Records behind a row that is kept. Of a verify, the device multiplies by as many as it keeps."""
    return 0 if seq.keep else 1 + seq.n_fold * seq.late


def takes_the_best(sampler: SlotSampler) -> bool:
    """True if the next token is that of the largest logit, unless that is banned: the device knows it before the host does."""
    edits = sampler.edits_logits and not sampler.only_bans
    is_free = sampler.budget is None or sampler.budget.is_far
    return sampler.params.greedy and not edits and sampler.params.logprobs is None and is_free
