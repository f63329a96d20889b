"""A forward that is under way: what it runs for, and what of it the host will read.

While one is, the next may be launched if it is known already what it will be (`Loop._fly_ahead`), so results have places of
their own until they are read: pinned memory, and an event that says when they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pyspec.job import Job
from pyspec.models.target import Out
from pyspec.sample.sampler import SlotSampler
from pyspec.slots.batch import Batch, Seq
from pyspec.slots.table import Slot


@dataclass(frozen=True, slots=True)
class Work:
    """One job's part in a round."""

    job: Job
    slot: Slot
    seq: Seq
    draft: Sequence[int]

    @property
    def is_plain(self) -> bool:
        """One row of a request that decodes."""
        return self.job.is_decoding and self.seq.width == 1 and self.seq.n_out == 1

    @property
    def is_prompt(self) -> bool:
        return self.seq.n_out == 0 or (self.seq.keep and self.seq.width > 1)


@dataclass(slots=True)
class Flight:
    """best: `Out.best` on the host once `done` says so; None on devices that give none.
    began, drafted: when its round began, and its drafts were there. launched: when the device was told.
    ahead: that was before the round before it was over, and what its rows' tokens are is not known here yet.
    off: slots for which it ran with another token than the round before turned out to give."""

    work: Sequence[Work]
    batch: Batch
    out: Out
    best: Tensor | None
    done: torch.cuda.Event | None
    began: float
    drafted: float
    launched: float
    ahead: bool = False
    off: set[int] = field(default_factory=set)

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    def keep(self, hidden: bool) -> None:
        """Copies of what the next forward overwrites, where it is read after that: what a drafter hears of this one, and what
        tells the best logit but the banned ones."""
        n, out = len(self.work), self.out
        if out.taps is not None:
            out = replace(out, taps=out.taps[:n].clone())
        if hidden:
            out = replace(out, hidden=out.hidden[:n].clone())
        if any(w.job.sampler.bias_ids for w in self.work):
            out = replace(out, logits=out.logits[:n].clone())
        self.out = out

    def strayed(self, taken: Sequence[Sequence[int] | None]) -> set[int]:
        """Slots of a plain round whose token is not what the device takes it for: the best was banned, or is none."""
        best = self.out.best if self.best is None else self.best
        assert best is not None
        tokens = best[0, : len(self.work)].tolist()
        return {w.slot.index for w, c, t in zip(self.work, taken, tokens, strict=True) if list(c or ()) != [t]}

    def abandon(self) -> None:
        """Nobody will read it; but what it uses may be freed next, so it has to be over, or the device to be lost."""
        with suppress(RuntimeError):
            self.wait()

    def name_tokens(self) -> None:
        """The round before is over: each request's row was that of its last token."""
        self.work = [replace(w, seq=replace(w.seq, tokens=[w.job.anchor or 0])) for w in self.work]
        self.batch = replace(self.batch, seqs=[w.seq for w in self.work])


class Pinned:
    """Host memory for what forwards send: two places in turn, for the one that is read and the one under way."""

    def __init__(self) -> None:
        self.places, self.turn = [torch.empty(0, dtype=torch.float64) for _ in range(2)], 0

    def copy(self, x: Tensor) -> Tensor:
        """Start the copy of a float64 tensor."""
        self.turn = 1 - self.turn
        if self.places[self.turn].numel() < x.numel():
            self.places[self.turn] = torch.empty(x.numel(), dtype=torch.float64, pin_memory=x.is_cuda)
        here = self.places[self.turn][: x.numel()].view_as(x)
        here.copy_(x, non_blocking=True)
        return here


def takes_the_best(sampler: SlotSampler) -> bool:
    """True if the next token is that of the largest logit, unless that is banned: the device knows it before the host does."""
    edits = sampler.edits_logits and not sampler.only_bans
    return sampler.params.greedy and not edits and sampler.params.logprobs is None
