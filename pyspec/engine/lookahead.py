"""A forward that is under way: what it runs for, and what of it the host will read.

While one is, the next may be launched (`Loop._fly_ahead`, `Course`), so results have places of their own until they are read:
pinned memory, and an event that says when they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pyspec.cuda.copies import copied
from pyspec.cuda.faults import EVERYONE, Fault
from pyspec.cuda.ops.ahead.op import ahead
from pyspec.cuda.ops.ahead.ref import MAX_ENDS, NOBODY, AheadSpec, n_kept
from pyspec.draft.drafter import Drafter, LookaheadDrafter, Needs
from pyspec.engine.job import Job
from pyspec.errors import SlotError
from pyspec.models.target import Out
from pyspec.sample.choose import Chosen, top
from pyspec.sample.sampler import SlotSampler
from pyspec.sample.synth import SynthAcceptance
from pyspec.slots.arena import BUCKETS, Arena
from pyspec.slots.batch import Batch, Seq, lay_out
from pyspec.slots.table import Slot, SlotTable


@dataclass(frozen=True, slots=True)
class Work:
    """One job's part in a round."""

    job: Job
    slot: Slot
    seq: Seq
    draft: Sequence[int]

    @property
    def is_prompt(self) -> bool:
        return self.seq.n_out == 0 or (self.seq.keep and self.seq.width > 1)


@dataclass(slots=True)
class Flight:
    """best: `Out.best` on the host once `done` says so; None on devices that give none.
    began, drafted: when its round began, and its drafts were there. launched: when the device was told.

    Of a round that was launched before the one before it was over (`ahead`):
    tokens: of its rows, on the host like `best`; None without drafts. on_device: from when to when its drafts were made.
    off: slots for which it ran with another token than the round before turned out to give.

    ends, forced: by what the device decided how far its rows are kept, if the next round is under way: `Course`.
    """

    work: Sequence[Work]
    batch: Batch
    out: Out
    best: Tensor | None
    done: torch.cuda.Event | None
    began: float
    drafted: float
    launched: float
    ahead: bool = False
    tokens: Tensor | None = None
    on_device: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    off: set[int] = field(default_factory=set)
    ends: Sequence[frozenset[int]] = ()
    forced: Sequence[int] | None = None

    @property
    def is_watched(self) -> bool:
        """What tripped in the drafter before it was asked for: not where nobody drafted behind the round before."""
        return not self.ahead or self.tokens is not None

    @property
    def found(self) -> Tensor | None:
        """`Out.best`, where the host reads it soonest."""
        return self.out.best if self.best is None else self.best

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    def keep(self, needs: Needs, is_next_launched: bool) -> None:
        """Copies of what the next forward overwrites: the hidden states that a drafter keeps, and where that forward is launched
        before this one is read, the taps it hears of and what tells the best logit but the banned ones."""
        n, out = self.batch.n_row, self.out
        if needs.hidden:
            out = replace(out, hidden=copied(out.hidden[:n]))
        if is_next_launched and out.taps is not None and needs.late and self.batch.single:
            out = replace(out, taps=copied(out.taps[:n]))
        if is_next_launched and any(w.job.sampler.bias_ids for w in self.work):
            out = replace(out, logits=copied(out.logits[:n]))
        self.out = out

    def name_tokens(self, ended: float) -> float:
        """The round before is over since `ended`: positions and tokens of the rows are known. Returns what drafting took, in
        seconds."""
        own = None if self.tokens is None else self.tokens.view(torch.int64).tolist()
        work = []
        for w, start in zip(self.work, self.batch.starts, strict=False):
            drafts = [] if own is None else own[start + 1 : start + w.seq.width]
            seq = replace(w.seq, n_past=w.slot.n_past, tokens=[w.job.anchor or 0, *drafts])
            work.append(replace(w, seq=seq, draft=drafts))
        self.work, self.batch = work, replace(self.batch, seqs=[w.seq for w in work])
        took = 1e-3 * self.on_device[0].elapsed_time(self.on_device[1]) if self.on_device is not None else 0.0
        self.began, self.drafted = ended, ended + took
        return took

    def agree(self, chosen: Sequence[Chosen | None]) -> tuple[list[Chosen | None], set[int]]:
        """What of a verdict stands where the next round is under way: so many rows as the device kept, for it has gone on from
        them. And the slots for which it did not go on, or with another token than theirs: the best is an end, or banned, or none."""
        assert self.found is not None
        found, out, off = list(map(int, self.found[0, : self.batch.n_row].tolist())), [], set()
        for i, (w, c) in enumerate(zip(self.work, chosen, strict=True)):
            own = found[self.batch.starts[i] : self.batch.starts[i + 1]]
            n = n_kept(w.draft, own, self.ends[i], None if self.forced is None else self.forced[i])
            if c is not None and len(c.tokens) > n:
                c = replace(c, tokens=c.tokens[:n], n_accepted=min(c.n_accepted, n - 1))
            elif c is not None and c.error is None and len(c.tokens) < n:
                c = Chosen([], 0, error=SlotError(f"the device kept {n} rows, of which {len(c.tokens)} are right"))
            if c is None or c.tokens != [*w.draft[: n - 1], own[n - 1]] or own[n - 1] in self.ends[i]:
                off.add(w.slot.index)
            out.append(c)
        return out, off

    def condemn(self, fault: Fault, chosen: Sequence[Chosen | None]) -> list[Chosen | None]:
        """A guard tripped in this forward: the slot it names loses its round, or all do if it names none.

        The forward ran, and every other slot's results are right: they are committed like those of any round.
        """
        guilty = fault.slot([w.seq.slot for w in self.work], self.batch.starts)
        return [
            Chosen([], 0, error=fault.error(w.seq.slot)) if guilty in (w.seq.slot, EVERYONE) else c
            for w, c in zip(self.work, chosen, strict=True)
        ]

    def abandon(self) -> None:
        """Nobody will read it; but what it uses may be freed next, so it has to be over, or the device to be lost."""
        with suppress(RuntimeError):
            self.wait()


@dataclass(frozen=True, slots=True)
class Laid:
    """A round that is ready to be launched. on_device: see Flight."""

    work: Sequence[Work]
    batch: Batch
    has_drafts: bool
    on_device: tuple[torch.cuda.Event, torch.cuda.Event] | None


class Course:
    """Lays out the round after one that is under way, from what of it the device keeps: no result has been read yet.

    Its rows are records, as those of drafts: should a request end with the round before, its rows of this one are never
    folded, and lie beyond what the slot committed. A single row of a request that can only end by a token is kept at once, if
    the device sees that the token before it is none of those.
    """

    def __init__(
        self, device: torch.device, table: SlotTable, arena: Arena | None, synth: SynthAcceptance | None
    ) -> None:
        self.device, self.table, self.arena, self.synth = device, table, arena, synth
        self.op = ahead.bind(AheadSpec(device))
        self._told: tuple[tuple[frozenset[int], ...], Tensor] = ((), torch.empty(0))  # ends, and as the device has them

    def goes_on(self, w: Work) -> bool:
        """Whatever the verdict is, this request goes on behind it, unless it ends there; and the device can tell how far."""
        job, width = w.job, w.seq.width
        return (
            job.is_decoding
            and w.seq.n_out == width
            and job.n_left > width
            and takes_the_best(job.sampler)
            and (width == 1 or self._ends_by_token(job))
        )

    def _ends_by_token(self, job: Job) -> bool:
        """As far as it is not known before: and the device knows by which."""
        request = job.request
        return not request.stop and request.max_predict_ms <= 0 and len(self._ends_of(job)) <= MAX_ENDS

    def lay_out(self, flight: Flight, n_drafts: Sequence[int], drafter: Drafter | None) -> Laid | None:
        """The next round, whose drafts are under way then. None: the host has to be asked. Raises SlotError."""
        work = flight.work
        if (any(n_drafts) and not isinstance(drafter, LookaheadDrafter)) or sum(n_drafts) + len(work) > BUCKETS[-1]:
            return None
        if flight.out.best is None:
            flight.out = replace(flight.out, best=top(flight.out.logits))
        assert flight.out.best is not None
        flight.ends, flight.forced = [frozenset()] * len(work), None
        beside: list[Tensor | None] = [None, None]
        keeps = [n == 0 and self._ends_by_token(w.job) for w, n in zip(work, n_drafts, strict=True)]
        if any(keeps) or any(w.seq.width > 1 for w in work):
            flight.ends = [e if len(e := self._ends_of(w.job)) <= MAX_ENDS else frozenset() for w in work]
            beside[0] = self._tell(tuple(flight.ends))
            if self.synth is not None:
                flight.forced = [self._coins(self.synth, w) for w in work]
                beside[1] = _sent(torch.tensor(flight.forced, dtype=torch.int32), self.device)
        began, drafts = stamp(self.device) if any(n_drafts) else None, None
        kept = self.op.accept(flight.out.best, flight.batch, *beside)
        if any(n_drafts):
            assert isinstance(drafter, LookaheadDrafter)
            drafts = drafter.draft_ahead(flight.batch, flight.out, kept, max(n_drafts))
            if drafts is None:
                return None
        seqs = [
            Seq(w.slot.index, w.slot.n_past, [0] * (1 + n), keep, 1 + n, int(not w.seq.keep), w.seq.width)
            for w, n, keep in zip(work, n_drafts, keeps, strict=True)
        ]
        batch = self.op.move(lay_out(self.table, seqs, self.device, arena=self.arena), kept, drafts)
        drafted = None if began is None else stamp(self.device)
        on_device = None if began is None or drafted is None else (began, drafted)
        then = [Work(w.job, w.slot, q, ()) for w, q in zip(work, batch.seqs, strict=True)]
        return Laid(then, batch, drafts is not None, on_device)

    def _ends_of(self, job: Job) -> frozenset[int]:
        """Behind these the host decides: the request may end, or take another token."""
        more = job.sampler.eog_ids if self.synth is not None else frozenset()
        return job.sampler.ends | job.sampler.bias_ids | more

    def _tell(self, ends: tuple[frozenset[int], ...]) -> Tensor:
        """[seq, MAX_ENDS]; they stay the same for many rounds."""
        if self._told[0] != ends:
            rows = [[*own, *[NOBODY] * (MAX_ENDS - len(own))] for own in map(sorted, ends)]
            self._told = ends, _sent(torch.tensor(rows, dtype=torch.int32), self.device)
        return self._told[1]

    @staticmethod
    def _coins(synth: SynthAcceptance, w: Work) -> int:
        sampler = w.job.sampler
        return synth.n_accepted(sampler.fingerprint, sampler.n_history, w.seq.width - 1)


def stamp(device: torch.device) -> torch.cuda.Event | None:
    """When the device has come this far."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """On its way, without waiting for the device."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


class Pinned:
    """Host memory for what forwards send: two places in turn, for the one that is read and the one under way."""

    def __init__(self) -> None:
        self.places, self.turn = [torch.empty(0, dtype=torch.float64) for _ in range(2)], 0

    def copy(self, x: Tensor) -> Tensor:
        """Start the copy of a tensor of 64-bit numbers; what comes is float64 in any case, to be viewed as what it was."""
        x = x.view(torch.float64)
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
