"""The worker runs the rounds of one device and decides nothing.

It owns the target with its memory, the drafter, and the graphs of their forwards. Results are copied to places of their own until the
host reads them, so that the next round may be launched meanwhile.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyspec.cpu.kernels import here
from pyspec.cuda.context import context_of, gpu_lock
from pyspec.cuda.faults import Reader
from pyspec.cuda.graph import Graphed, copied
from pyspec.cuda.ops.ahead.ref import Kept
from pyspec.device.ahead_rows import AheadRows
from pyspec.device.expert_uploads import ExpertUploads
from pyspec.device.expert_use import ExpertLog
from pyspec.draft.drafter import NO_DRAFTER, Drafter, DraftPlan
from pyspec.errors import DeviceError, DoesNotFit, EngineBug, PyspecError
from pyspec.models.target import Out, Target
from pyspec.sample.choose import top
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch, lay_out, sent
from pyspec.slots.drafts import DraftsAhead
from pyspec.slots.memory import Memory
from pyspec.slots.parts import PartMemory
from pyspec.slots.round import LogitsNeed, Round
from pyspec.slots.table import Slot, SlotTable


@dataclass(slots=True, weakref_slot=True)
class Launched:
    """A launched forward.

    best      `Out.best` on the host, valid after `done`; None on devices without it
    tokens    tokens of its rows, if the device drafted them, valid after `drafted_tokens`; else None
    q         of those drafts, as in DraftsAhead
    drafting  events at start and end of drafting
    keeps_logits  the host may read its logits after the next forward was launched, which overwrites them
    log       as of `ExpertLog.copy`, valid after `done`
    elsewhere  the same forward on other ranks
    """

    batch: Batch
    out: Out
    best: Tensor | None
    done: torch.cuda.Event | None
    tokens: Tensor | None = None
    q: Tensor | None = None
    drafting: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    keeps_logits: bool = True
    log: Tensor | None = None
    elsewhere: object = None

    @property
    def found(self) -> Tensor | None:
        """`Out.best` in the place that the host can read first."""
        return self.out.best if self.best is None else self.best

    def drafted_tokens(self) -> Tensor | None:
        """[row] int64: `tokens`, once the device has drafted them; the forward may still run. Callers may write to it."""
        if self.drafting is not None:
            self.drafting[1].synchronize()
        return None if self.tokens is None else self.tokens.view(torch.int64)

    @property
    def is_over(self) -> bool:
        """The device has finished it."""
        return self.done is None or self.done.query()

    def wait(self) -> None:
        """Wait until the device has finished it."""
        if self.done is not None:
            self.done.synchronize()

    def abandon(self) -> None:
        """Wait for a forward whose results are not read, because its memory may be freed next. Ignores errors of the device."""
        with suppress(RuntimeError):
            self.wait()

    def copy_results(self, plan: DraftPlan, *, is_next_launched: bool) -> None:
        """Copy results that the next forward overwrites: hidden states for the drafter, and, if that forward is launched before this one is read,
        taps for the drafter and logits that the host may read."""
        n, out = self.batch.n_row, self.out
        if plan.observes == "hidden":
            out = replace(out, hidden=copied(out.hidden[:n]))
        reads_taps = plan.observes == "taps" or (plan.n_held > 0 and self.batch.single)
        if is_next_launched and out.taps is not None and reads_taps:
            out = replace(out, taps=copied(out.taps[:n]))
        if is_next_launched and self.keeps_logits:
            out = replace(out, logits=copied(out.logits[:n]))
        self.out = out


class Worker:
    """One device's model and slots. One thread calls its methods, and holds `lock` while it launches work."""

    def __init__(
        self,
        target: Target,
        memory: Memory,
        table: SlotTable,
        drafter: Drafter | None,
        arena: Arena | None,
        n_suffix: int = 0,
    ) -> None:
        self.target = target
        self.memory = memory
        self.table = table
        self.device = target.device
        self.arena = arena  # batches of graphs; None: no graphs
        self.lock = gpu_lock(self.device)
        n_slot, self.drafter, self.n_suffix = len(table.slots), drafter, n_suffix
        self.ahead_rows = AheadRows(self.device, n_slot, n_slot * (self.n_draft + 1))
        self.faults, self.draft_faults = Reader(self.device), Reader(self.device)
        # results of rounds, and their tokens
        self._best = Pinned()
        self._found = Pinned()
        self._tokens = Pinned()
        self._n_recorded = 0
        self.shown: dict[int, Tensor] = {}  # rows of pictures [row, width] f32 on the device, by handle
        self.experts: ExpertLog | None = None  # of those in the host's memory
        self.uploads: ExpertUploads | None = None  # None: each stays where it is
        self.use(drafter)

    def use(self, drafter: Drafter | None) -> None:
        """Set the drafter; graphs of forwards with another one are dropped."""
        self.drafter = drafter
        self.forward = Graphed(self.run, by_single=self.plan.n_held > 0)
        if self.arena is not None:
            self.arena.prompts.clear()

    @property
    def plan(self) -> DraftPlan:
        """The drafter's."""
        return self.drafter.plan if self.drafter is not None else NO_DRAFTER

    @property
    def n_draft(self) -> int:
        """Tokens of the longest draft, by the drafter or by suffixes."""
        return max(self.plan.n_draft, self.n_suffix)

    def has_recorded(self) -> bool:
        """Forwards of new shapes were recorded since the last call, on this thread: other rounds of their size take less time."""
        before, self._n_recorded = self._n_recorded, here.n_first
        return before != self._n_recorded

    # -- rounds --------------------------------------------------------------------------------------------------

    def launch(self, round_: Round) -> Launched:
        """Launch a round with known tokens."""
        batch = self._lay_out(round_)
        self.watch_drafter()
        return self._send(batch, round_.reads)

    def launch_behind(self, before: Launched, round_: Round) -> Launched | None:
        """Launch a round that continues `before`, however many rows that keeps. Returns None if the drafter needs the host."""
        behind = round_.behind
        assert behind is not None
        if before.out.best is None:
            before.out = replace(before.out, best=top(before.out.logits))
        assert before.out.best is not None
        began, drafts = stamp(self.device) if behind.n_draft else None, None
        kept = self.ahead_rows.accept(before.batch, before.out.best, behind)
        if behind.n_draft:
            drafts = self._draft(before, round_, kept)
            if drafts is None:
                return None
        return self._go_on(before, round_, kept, drafts, began)

    def _go_on(
        self,
        before: Launched,
        round_: Round,
        kept: Kept,
        drafts: DraftsAhead | None,
        began: torch.cuda.Event | None,
    ) -> Launched:
        """Launch a round behind the kept rows of `before`. began: when its drafts were asked for."""
        assert round_.behind is not None
        own, q = (None, None) if drafts is None else (drafts.tokens, drafts.q)
        batch = self.ahead_rows.move(self._lay_out(round_), kept, own)
        tokens = None if own is None else self._tokens.copy(batch.tokens[: batch.n_row])
        drafted = None if began is None else stamp(self.device)
        if own is not None:
            self.watch_drafter()
        if round_.behind.known is None:  # else they are copied, and the drafter has seen them
            before.copy_results(self.plan, is_next_launched=True)
        launched = self._send(batch, round_.reads)
        launched.tokens, launched.q = tokens, q
        launched.drafting = None if began is None or drafted is None else (began, drafted)
        return launched

    def _draft(self, before: Launched, round_: Round, kept: Kept) -> DraftsAhead | None:
        """Drafts of a round that continues `before`."""
        assert round_.behind is not None
        assert self.drafter is not None
        most = max(round_.behind.n_draft)
        if round_.behind.known is not None:
            return self.drafter.draft_behind(
                [self.table.slots[seq.slot] for seq in round_.seqs], kept, most
            )
        return self.drafter.draft_ahead(before.batch, before.out, kept, most)

    def _lay_out(self, round_: Round) -> Batch:
        return lay_out(
            self.table,
            round_.seqs,
            self.device,
            arena=self.arena,
            pages=round_.pages,
            pictures=self.shown,
        )

    def _send(self, batch: Batch, reads: LogitsNeed) -> Launched:
        if self.device.type == "cpu":
            self.faults.clear()  # a recording has kernels alone
        if self.uploads is not None:
            self.uploads.before()
        out = self.results(batch, reads)
        if self.uploads is not None:
            self._upload(self.uploads)
        best = None if out.best is None else self._best.copy(out.best)
        log = (
            None if self.experts is None else self.experts.copy(batch.n_row, batch.bucket or batch.n_row)
        )
        self.faults.fetch()
        keeps_logits = self.keeps_logits(reads)
        return Launched(batch, out, best, stamp(self.device), keeps_logits=keeps_logits, log=log)

    def results(self, batch: Batch, reads: LogitsNeed) -> Out:
        """Those of a forward."""
        return self.forward(batch)

    def _upload(self, uploads: ExpertUploads) -> None:
        """Begin copies behind a round, which they can not fail."""
        try:
            uploads.behind()
        except Exception as e:
            if is_device_error(e):
                raise
            uploads.failed = e

    def keeps_logits(self, reads: LogitsNeed) -> bool:
        """True if the host may read logits of a forward that the next one overwrites. If the largest one is banned, they also give the best
        token."""
        return reads.logits or bool(reads.bans)

    def show(self, handle: int, rows: Tensor) -> None:
        """Bring rows of a picture to the device, where they may be: forwards will read them, until `hide`."""
        if handle not in self.shown:
            self.shown[handle] = rows if rows.device == self.device else sent(rows, self.device)

    def hide(self, unread: Container[int]) -> None:
        """Free the rows of pictures but these. Forwards that were launched may still read them."""
        self.shown = {handle: rows for handle, rows in self.shown.items() if handle in unread}

    def bring(self, launched: Launched, found: Tensor) -> Tensor:
        """[2, row] f64 on the host, valid once `launched` is over: an additional result of its rows."""
        here = self._found.copy(found)
        launched.done = stamp(self.device)
        return here

    def run(self, batch: Batch) -> Out:
        """All device work of a verify that does not depend on the acceptance. A graph may hold it."""
        self.faults.clear()
        out = self.target.run(batch, self.plan.taps)
        if self.drafter is not None:
            self.drafter.absorb(batch, out)
        has_best = out.best is not None or batch.tokens.device.type == "cpu"
        return out if has_best else replace(out, best=top(out.logits))

    def watch_drafter(self) -> None:
        """Read the fault record for the drafter: the forward clears it first, and its own faults come later."""
        if self.drafter is not None:
            self.draft_faults.fetch()

    def forget_round(self) -> None:
        """Clear fault records of rounds that are not read."""
        for reader in (self.faults, self.draft_faults):
            reader.fetched.clear()
            reader.clear()

    def leave(self) -> None:
        """Let go of other ranks, and wait for copies from host memory, which is freed next. Nothing runs after that. Ignores errors of the device."""
        for stream in list(context_of(self.device).copies):
            with suppress(RuntimeError):
                stream.synchronize()

    # -- slots' memory ------------------------------------------------------------------------------------------

    def fold(self, slot: Slot) -> None:
        """Fold pending records, so that the slot's state is at its committed length."""
        for layer in self.memory.states.values():
            layer.fold(layer, slot.index, slot.n_fold)
        slot.n_fold = 0

    def pools(self) -> list[PartMemory]:
        """All paged memory: the target's layers and the drafter's."""
        return [*self.memory.paged, *self.draft_pools()]

    def draft_pools(self) -> Iterable[PartMemory]:
        """The drafter's paged memory."""
        return self.drafter.pools() if self.drafter is not None else ()


class Pinned:
    """Host memory for results: two places in turn, for the round that is read and the one in flight."""

    def __init__(self) -> None:
        self.places, self.at = [torch.empty(0, dtype=torch.float64) for _ in range(2)], 0

    def copy(self, x: Tensor) -> Tensor:
        """Start the copy of a tensor of 64-bit numbers. The result is float64; view it as the original dtype."""
        x = x.view(torch.float64)
        self.at = 1 - self.at
        if self.places[self.at].numel() < x.numel():
            self.places[self.at] = torch.empty(x.numel(), dtype=torch.float64, pin_memory=x.is_cuda)
        here = self.places[self.at][: x.numel()].view_as(x)
        here.copy_(x, non_blocking=True)
        return here


def stamp(device: torch.device) -> torch.cuda.Event | None:
    """Record a CUDA event."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def is_device_error(error: BaseException) -> bool:
    """True if the device is lost to this process: no later call can succeed. Running out of memory is not such an error."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, DeviceError) or type(error).__name__ in ("AcceleratorError", "CUDAError"):
        return True
    return isinstance(error, RuntimeError) and "CUDA" in str(error) and "error" in str(error).lower()


def failure_of(error: BaseException, doing: str = "") -> PyspecError:
    """Classify an unexpected exception for the owner of the process: the device failed, memory did not suffice, or we have a bug.

    doing  the failed step, such as "loading failed"
    """
    lines = str(error).strip().splitlines()
    step = f"{doing}: {type(error).__name__}" if doing else type(error).__name__
    message = f"{step}: {lines[0][:300] if lines else 'no reason given'}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return DoesNotFit(f"{message}; fewer slots (-np) or shorter contexts (-c) take less")
    if is_device_error(error):
        return DeviceError(message)
    return EngineBug(f"{message} (a bug in pyspec: please report it with the log)")
