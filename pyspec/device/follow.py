"""Any rank but the first: the same worker and divided drafter on its share of the weights. It runs the first rank's calls, and decides nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pyspec.cuda.ops.ahead.ref import Kept
from pyspec.device import shares
from pyspec.device.shares import RankWorker
from pyspec.device.worker import Launched
from pyspec.draft.drafter import NO_DRAFTER, Drafter, DraftPlan
from pyspec.errors import EngineBug
from pyspec.models.gathered import shared
from pyspec.models.target import Target
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch, Seq, lay_out
from pyspec.slots.drafts import DraftRequest, DraftsAhead
from pyspec.slots.memory import Checkpoint, Memory
from pyspec.slots.round import LogitsNeed, Round
from pyspec.slots.states import to_host
from pyspec.slots.table import Slot, SlotTable

Call = tuple[str, tuple[Any, ...]]
"""A method's name and its arguments, as plain integers."""


def title(call: Call) -> str:
    """What it is, for people."""
    name, args = call
    return f"{name}: {args[0]}" if name == "draft" else name


@dataclass(frozen=True, slots=True)
class SlotNews:
    """A slot that has changed. pages: None if they are the same as before."""

    index: int
    generation: int
    n_past: int
    pages: NDArray[np.int64] | None


@dataclass
class RankSlot(Slot):
    """A slot whose tokens only the first rank knows."""

    n_token: int = 0

    @property
    def n_past(self) -> int:
        return self.n_token


class RankTable(SlotTable):
    """Lengths and pages of the first rank's slots. may_grow: rows are not read again, so any free page will do."""

    may_grow = False

    def __init__(self, n_slot: int, n_page: int, page_size: int) -> None:
        super().__init__(n_slot, n_page, page_size)
        self.slots = [RankSlot(i) for i in range(n_slot)]

    def grow(self, slot: Slot, n_tokens: int) -> None:
        """Refuses pages that the first rank has not named."""
        if not self.may_grow and self.pages_for(n_tokens) > len(slot.pages):
            raise EngineBug(
                f"the first rank has named no page of slot {slot.index} for {n_tokens} tokens"
            )
        super().grow(slot, n_tokens)

    def hear(self, news: Sequence[SlotNews]) -> None:
        """Enter these changes."""
        for one in news:
            slot = self.slots[one.index]
            assert isinstance(slot, RankSlot)
            slot.generation, slot.n_token = one.generation, one.n_past
            if one.pages is not None:
                slot.pages, slot.page_ids = one.pages.tolist(), one.pages


class Follower(RankWorker):
    """It runs calls in order. drafter: its share of one that ranks divide; None: the first rank drafts alone, or nothing does.

    kept  checkpoints, in host memory, and forwards, by the numbers that the first rank gave them
    """

    table: RankTable

    def __init__(
        self,
        target: Target,
        memory: Memory,
        table: RankTable,
        drafter: Drafter | None,
        arena: Arena | None,
        plan: DraftPlan,
    ) -> None:
        """plan: of the drafter on the first rank."""
        # Of one that is whole there: what decides about rows, results and graphs of forwards. NCCL wants a collective in a graph of every rank, or
        # in none
        whole = replace(NO_DRAFTER, n_draft=plan.n_draft, taps=plan.taps, n_held=plan.n_held)
        self._plan = whole if drafter is None else plan
        self.kept: dict[int, Any] = {}
        super().__init__(target, memory, table, drafter, arena, plan.n_suffix)

    @property
    def plan(self) -> DraftPlan:
        return self._plan

    @torch.inference_mode()
    def obey(self, call: Call) -> None:
        """Run one call."""
        name, args = call
        if name.startswith("_") or name not in vars(Follower):
            raise EngineBug(f"{name} is no call of the first rank")
        with self.ranks.calls.within(title(call)):
            getattr(self, name)(*args)

    # -- rounds --------------------------------------------------------------------------------------------------

    def launch(self, round_: Round, number: int = 0) -> Launched:
        """As of Worker, kept under this number."""
        self.kept[number] = launched = super().launch(round_)
        return launched

    def launch_behind(  # type: ignore[override]
        self, before: int, round_: Round, number: int, news: Sequence[SlotNews]
    ) -> None:
        """As of Worker, behind the forward of that number."""
        self.table.hear(news)
        launched = super().launch_behind(self.kept[before], round_)
        if launched is not None:
            self.kept[number] = launched

    def _draft(self, before: Launched, round_: Round, kept: Kept) -> DraftsAhead | None:
        if self.drafter is not None:
            return super()._draft(before, round_, kept)
        assert round_.behind is not None
        shape = len(round_.seqs), max(round_.behind.n_draft)
        tokens = torch.empty(shape, dtype=torch.int64, device=self.device)
        self.ranks.spread(tokens)  # the first rank drafts alone
        return DraftsAhead(tokens)

    def _send(self, batch: Batch, reads: LogitsNeed) -> Launched:
        """The first rank reads results and faults."""
        return Launched(batch, self.results(batch, reads), None, None, keeps_logits=False)

    def watch_drafter(self) -> None:
        """The first rank does."""

    def run_batch(
        self, seqs: Sequence[Seq], pages: Sequence[NDArray[np.int64]], in_arena: bool, prompt: int
    ) -> None:
        """A forward whose results are not used. in_arena: a graph may hold it. prompt: rows that a whole prompt is padded to in a graph; 0: in none."""
        arena = self.arena if in_arena else None
        if arena is not None and prompt:
            arena.prompts.add(prompt)
        self.forward(self._batch(seqs, pages, arena)).whole()

    def run_target(
        self, seqs: Sequence[Seq], pages: Sequence[NDArray[np.int64]], taps: Sequence[int]
    ) -> None:
        """A forward of the target alone."""
        self.target.run(self._batch(seqs, pages, None), taps).whole()

    def _batch(
        self, seqs: Sequence[Seq], pages: Sequence[NDArray[np.int64]], arena: Arena | None
    ) -> Batch:
        return lay_out(self.table, seqs, self.device, pages=pages, arena=arena, pictures=self.shown)

    def seal(self) -> None:
        """Capture no more graphs."""
        self.forward.seal()

    # -- pictures ------------------------------------------------------------------------------------------------

    def show_rows(self, handle: int, n_row: int, width: int) -> None:
        """Receive rows [n_row, width] f32 of a picture from the first rank."""
        self.shown[handle] = torch.empty(n_row, width, device=self.device)
        self.ranks.spread(self.shown[handle])

    def hide_rows(self, unread: frozenset[int]) -> None:
        """Free the rows of pictures but these."""
        self.hide(unread)

    # -- drafts --------------------------------------------------------------------------------------------------

    def draft(self, name: str, news: Sequence[SlotNews], args: Sequence[Any]) -> None:
        """A method of `Drafter` that every rank calls (device/lead.py), with slots by their indices."""
        self.table.hear(news)
        self.table.may_grow = name == "capture"
        if name == "observe":
            number, seqs, starts, kept = args
            launched = self.kept[number]
            args = replace(launched.batch, seqs=seqs, starts=starts), kept, launched.out
        elif name == "draft":
            args = ([DraftRequest(self.table.slots[i], *rest) for i, *rest in args[0]],)
        elif name == "check":
            args = self.target, self.table.slots[args[0]], *args[1:]
        elif args:
            args = self.table.slots[args[0]], *args[1:]
        getattr(self.drafter, name)(*args)
        self.table.may_grow = False

    def find_best(self, n_row: int) -> None:
        """Find the best tokens of `n_row` rows of the first rank, with each rank's part of the head."""
        head = shared(self.target.output)
        assert head is not None
        rows = torch.empty(n_row, self.target.n_embd, device=self.device)
        head.ranks.spread(rows)
        head.best(head.own(rows))

    # -- slots' memory -------------------------------------------------------------------------------------------

    def fold_slot(self, slot: int, n_fold: int) -> None:
        """Fold recorded rows into the slot's state."""
        self.table.slots[slot].n_fold = n_fold
        self.fold(self.table.slots[slot])

    def reset(self, slot: int) -> None:
        """As of Memory, as are the methods below; checkpoints have numbers."""
        self.memory.reset(slot)

    def copy_page(self, new: int, old: int) -> None:
        """In every paged part."""
        self.memory.copy_page(self.memory.paged, self.table.page_size, new, old)

    def read_pages(self, pages: Sequence[int]) -> None:
        """Send these pages to the first rank."""
        deque(shares.gather_pages(self.memory, self.ranks, self.table.page_size, pages), maxlen=0)

    def write_pages(self, pages: Sequence[int]) -> None:
        """Receive these pages from the first rank."""
        shares.deal_pages(self.memory, self.ranks, self.table.page_size, pages, None)

    def keep_state(self, number: int, slot: int, n_past: int) -> None:
        """Take a checkpoint, to the host: the first rank's budget counts its own device only."""
        self.kept[number] = to_host(self.memory.checkpoint(slot, n_past))

    def restore_state(self, number: int, slot: int) -> None:
        """Restore a checkpoint."""
        self.memory.restore(slot, self.kept[number])

    def read_state(self, number: int) -> None:
        """Send a checkpoint to the first rank."""
        deque(shares.gather_state(self.ranks, self.kept[number].tensors), maxlen=0)

    def make_state(self, number: int, n_past: int) -> None:
        """Receive a checkpoint from the first rank."""
        own = shares.deal_state(self.memory, self.ranks, n_past, None)
        self.kept[number] = to_host(Checkpoint(n_past, own))

    def drop(self, *numbers: int) -> None:
        """Free the checkpoints and forwards of these numbers, as the first rank has."""
        for number in numbers:
            self.kept.pop(number, None)  # a round that was not launched has a number, too
