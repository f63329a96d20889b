"""DFlash divided over ranks: each has a share of the heads and inner values of every layer, of the context, and of the target's head.

All ranks have the taps, because the residual stream is the same on each of them. So each makes its share of the context in the
verify's own graph. The first rank sends the rows of a block as plain integers; the sums of the layers give every rank all of the
result, and every rank finds the drafts. In a round ahead each rank moves the rows behind those that it has counted itself.
Taps that wait for the next draft are held on the first rank, which spreads them before the context is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyspec.cuda.collective import Collective
from pyspec.cuda.graph import Graphed
from pyspec.cuda.ops.ahead.ref import Kept
from pyspec.draft import tap_shift
from pyspec.draft.dflash import DFlash
from pyspec.draft.dflash_file import DFlashConfig
from pyspec.draft.dflash_net import DFlashNet
from pyspec.draft.drafter import DraftCommand, DraftLead, DraftPlan
from pyspec.draft.draws import Draws
from pyspec.models.gathered import shared
from pyspec.models.target import Out, Target
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch, Seq, lay_out
from pyspec.slots.drafts import DraftsAhead
from pyspec.slots.parts import PartMemory
from pyspec.slots.table import Slot, SlotTable

Pages = tuple[NDArray[np.int64], ...]

# -- commands ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunBlocks(DraftCommand):
    """Run blocks in these pages. moves: behind the rows that this rank has counted as kept."""

    seqs: tuple[Seq, ...]
    pages: Pages
    in_arena: bool
    moves: bool


@dataclass(frozen=True, slots=True)
class FindDrafts(DraftCommand):
    """Find `n_draft` tokens of each of the `n_seq` blocks that ran last."""

    n_seq: int
    n_draft: int


@dataclass(frozen=True, slots=True)
class MakeContext(DraftCommand):
    """Make context rows of held taps: receive the first `n_held` of them from the first rank."""

    seqs: tuple[Seq, ...]
    pages: Pages
    in_arena: bool
    n_held: int


@dataclass(frozen=True, slots=True)
class TakeTaps(DraftCommand):
    """Make context rows of `n_row` taps of the first rank, which sends their places and positions, too."""

    n_row: int


@dataclass(frozen=True, slots=True)
class SealPasses(DraftCommand):
    """Capture no more graphs of blocks, or of context."""

    of_blocks: bool


# -- the first rank ----------------------------------------------------------------------------------------------


class LedBlocks(Graphed[Tensor]):
    """Passes of blocks on all ranks. unmoved: rows of the next one as they were before, if every rank moves them."""

    def __init__(self, fn: Callable[[Batch], Tensor], lead: DraftLead) -> None:
        super().__init__(fn)
        self.lead = lead
        self.unmoved: tuple[Seq, ...] | None = None

    def __call__(self, batch: Batch) -> Tensor:
        unmoved, self.unmoved = self.unmoved, None
        seqs = tuple(batch.seqs) if unmoved is None else unmoved
        command = RunBlocks(seqs, tuple(batch.pages), batch.bucket is not None, unmoved is not None)
        with self.lead.together(command):
            return super().__call__(batch)

    def seal(self) -> None:
        """On every rank."""
        self.lead.send(SealPasses(of_blocks=True))
        super().seal()


class LedContext(Graphed[None]):
    """Context of held taps on all ranks. held: those taps."""

    def __init__(self, fn: Callable[[Batch], None], lead: DraftLead, held: Callable[[], Tensor]) -> None:
        super().__init__(fn)
        self.lead, self.held = lead, held

    def __call__(self, batch: Batch) -> None:
        held, rows = self.held(), (tuple(batch.seqs), tuple(batch.pages), batch.bucket is not None)
        with self.lead.together(MakeContext(*rows, len(held))):
            if len(held):
                self.lead.ranks.spread(held)
            super().__call__(batch)

    def seal(self) -> None:
        """On every rank."""
        self.lead.send(SealPasses(of_blocks=False))
        super().seal()


class LedNet:
    """The layers of all ranks, for the check of a load (tap_shift.py)."""

    def __init__(self, drafter: DividedDFlash) -> None:
        self.drafter, self.net = drafter, drafter.net

    @property
    def c(self) -> DFlashConfig:
        return self.net.c

    def inject(self, taps: Tensor, rows: Tensor, positions: Tensor) -> None:
        """As of DFlashNet, on every rank."""
        lead = self.drafter.lead
        with lead.together(TakeTaps(len(taps))):
            for x in (taps, rows, positions):
                lead.ranks.spread(x.contiguous())
            self.net.inject(taps, rows, positions)

    def forward(self, batch: Batch) -> Tensor:
        """As of DFlashNet, on every rank."""
        return self.drafter.block(batch)

    def drafts(
        self, block: Tensor, n_draft: int, anchors: Tensor, *, tells: bool
    ) -> tuple[Tensor, Tensor | None]:
        """As of DFlashNet: of the last block."""
        with self.drafter.lead.together(FindDrafts(len(block), n_draft)):
            return self.net.drafts(block, n_draft, anchors, tells=tells)


class DividedDFlash(DFlash):
    """The first rank's part: it decides, and sends each pass to the others."""

    is_divided = True

    def __init__(
        self,
        net: DFlashNet,
        plan: DraftPlan,
        table: SlotTable,
        target: Target,
        lead: DraftLead,
        p_min: float = 0.0,
    ) -> None:
        super().__init__(net, plan, table, target.device, p_min)
        _join(net, target)
        self.lead = lead
        self.block: LedBlocks = LedBlocks(net.forward, lead)
        self.inject: LedContext = LedContext(self._inject, lead, lambda: self.held[: self.n_held])

    def draft_ahead(self, batch: Batch, out: Out, kept: Kept, n_draft: int) -> DraftsAhead | None:
        """As of DFlash, once every rank knows which rows are accepted."""
        return super().draft_ahead(batch, out, kept, n_draft) if self.lead.has_accepted else None

    def draft_behind(self, slots: Sequence[Slot], kept: Kept, n_draft: int) -> DraftsAhead | None:
        """As of DFlash, once every rank has the prompt's token."""
        return super().draft_behind(slots, kept, n_draft) if self.lead.has_accepted else None

    def _lay_out(
        self,
        slots: Sequence[Slot],
        anchors: Sequence[int],
        n_draft: int,
        slack: Sequence[int] = (),
        back: int = 0,
    ) -> Batch:
        batch = super()._lay_out(slots, anchors, n_draft, slack, back)
        self.block.unmoved = tuple(batch.seqs) if slack else None  # with slack they are moved next
        return batch

    def _tokens(
        self,
        block: Tensor,
        n_seq: int,
        n_draft: int,
        given: Tensor,
        *,
        tells: bool = False,
        draws: Draws | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert draws is None, "a drafter that draws is not divided"
        with self.lead.together(FindDrafts(n_seq, n_draft)):
            return super()._tokens(block, n_seq, n_draft, given, tells=tells)

    def check(self, target: Target, slot: Slot, tokens: Sequence[int]) -> str | None:
        return tap_shift.warning(LedNet(self), self.plan.n_draft, target, self.table, slot, tokens)

    def forget(self) -> None:
        self.block.forget()
        self.inject.forget()

    def pools(self) -> Iterable[PartMemory]:
        return ()  # they stand beside the target's


# -- the others --------------------------------------------------------------------------------------------------


class DFlashShare(DFlash):
    """Another rank's part. It decides nothing, and keeps no account of slots."""

    def __init__(
        self, net: DFlashNet, plan: DraftPlan, table: SlotTable, target: Target, arena: Arena | None
    ) -> None:
        super().__init__(net, plan, table, target.device, p_min=0.0)
        self.ranks = _join(net, target)
        self.arena = arena
        self._block = self._given = torch.empty(0)

    def obey(self, command: DraftCommand, kept: Kept | None) -> None:
        """Run one command. kept: the rows of the last verify."""
        if isinstance(command, RunBlocks):
            self._run_blocks(command, kept)
        elif isinstance(command, FindDrafts):
            n = command.n_seq, command.n_draft
            tokens, _ = self._tokens(self._block, *n, self._given)
            self.found = tokens.view(command.n_seq, command.n_draft)
        elif isinstance(command, MakeContext):
            if command.n_held:
                self.ranks.spread(self.held[: command.n_held])
            self.inject(self._batch(command.seqs, command.pages, command.in_arena))
        elif isinstance(command, TakeTaps):
            self._take_taps(command.n_row)
        elif isinstance(command, SealPasses):
            (self.block if command.of_blocks else self.inject).seal()

    def _run_blocks(self, command: RunBlocks, kept: Kept | None) -> None:
        batch = self._batch(command.seqs, command.pages, command.in_arena, see_block=True)
        if command.moves:
            assert kept is not None
            batch = self.ahead.move(batch, kept)
        self._block, self._given = self.block(batch), batch.tokens

    def _take_taps(self, n_row: int) -> None:
        taps = torch.empty(n_row, self.net.n_feature, device=self.device)
        rows, positions = torch.empty(2, n_row, dtype=torch.int64, device=self.device).unbind()
        for x in (taps, rows, positions):
            self.ranks.spread(x)
        self.net.inject(taps, rows, positions)

    def _batch(
        self, seqs: Sequence[Seq], pages: Pages, in_arena: bool, *, see_block: bool = False
    ) -> Batch:
        arena = self.arena if in_arena else None
        return lay_out(self.table, seqs, self.device, see_block=see_block, arena=arena, pages=pages)


def _join(net: DFlashNet, target: Target) -> Collective:
    """Read the target's head on all ranks together, and have its memory keep the drafter's pages with its own. Returns the ranks."""
    head = shared(target.output)
    assert head is not None, "ranks divide a drafter that reads the target's head"
    net.find_best, net.parts = None, head
    target.memory.beside = list(net.memory.paged)
    return head.ranks
