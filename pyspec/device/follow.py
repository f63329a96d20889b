"""Any rank but the first: it runs its share of the model, keeps its share of the slots' memory, and decides nothing."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from pyspec.cuda.graph import Graphed
from pyspec.cuda.ops.ahead.ref import Kept, described
from pyspec.device import shares
from pyspec.device.ahead_rows import AheadRows
from pyspec.device.commands import (
    AcceptRows,
    Command,
    CopyPage,
    FoldSlot,
    HeadBest,
    HidePictures,
    KeepState,
    MakeState,
    OfPages,
    OfStates,
    ReadPages,
    ReadState,
    ResetSlot,
    RestoreState,
    RunForward,
    SealGraphs,
    ShowPicture,
)
from pyspec.draft.drafter import DraftCommand, Drafter
from pyspec.models.gathered import shared
from pyspec.models.target import Out, Target
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch, lay_out
from pyspec.slots.memory import Checkpoint, Memory
from pyspec.slots.states import to_host
from pyspec.slots.table import SlotTable


class Follower:
    """It runs commands in order.

    table  for the arithmetic of pages only: the first rank knows the slots' requests
    arena  place of batches that the first rank has in its arena: they are padded alike, in a graph or not
    drafter  its part of a drafter that ranks divide
    kept_states  checkpoints by their numbers, in host memory
    shown  rows of pictures, by handle
    """

    def __init__(
        self,
        target: Target,
        memory: Memory,
        table: SlotTable,
        arena: Arena | None = None,
        drafter: Drafter | None = None,
        width: int = 1,
    ) -> None:
        """width: rows of a slot's largest verify."""
        self.target = target
        self.memory = memory
        self.table = table
        self.arena = arena
        self.drafter = drafter
        # By their taps, and whether drafts absorb them
        self._graphs: dict[tuple[tuple[int, ...], bool], Graphed[Out]] = {}
        self.kept_states: dict[int, Checkpoint] = {}
        self.shown: dict[int, Tensor] = {}
        n_slot = len(table.slots)
        self.ahead_rows = AheadRows(target.device, n_slot, n_slot * width)
        self._last: tuple[Batch, Out] | None = None
        self._kept: Kept | None = None
        self._has_drafts = False  # that go into the next rows

    @torch.inference_mode()
    def obey(self, command: Command) -> None:
        """Run one command."""
        if isinstance(command, RunForward):
            self._forward(command)
        elif isinstance(command, AcceptRows):
            assert self._last is not None and self._last[1].best is not None
            self._kept = self.ahead_rows.accept(self._last[0], self._last[1].best, command.behind)
            self._has_drafts = bool(command.behind.n_draft)
        elif isinstance(command, DraftCommand):
            assert self.drafter is not None
            self.drafter.obey(command, self._kept)
        elif isinstance(command, HeadBest):
            self._head_best(command)
        elif isinstance(command, SealGraphs):
            for graphs in self._graphs.values():
                graphs.seal()
        elif isinstance(command, FoldSlot):
            for layer in self.memory.states.values():
                layer.fold(layer, command.slot, command.n_fold)
        elif isinstance(command, ShowPicture):
            rows = torch.empty(command.n_row, command.width, device=self.target.device)
            assert self.target.ranks is not None
            self.target.ranks.spread(rows)
            self.shown[command.handle] = rows
        elif isinstance(command, HidePictures):
            self.shown = {h: rows for h, rows in self.shown.items() if h in command.unread}
        elif isinstance(command, OfPages):
            self._of_pages(command)
        else:
            self._of_states(command)

    def _forward(self, command: RunForward) -> None:
        arena = self.arena if command.in_arena else None
        if arena is not None and command.prompt:
            arena.prompts = {command.prompt}
        batch = lay_out(
            self.table,
            command.seqs,
            self.target.device,
            pages=command.pages,
            arena=arena,
            pictures=self.shown,
        )
        if command.is_moved:
            assert arena is not None and self.target.ranks is not None
            self.target.ranks.spread(arena.memory)
            batch = described(batch)
        elif command.moves:
            assert self._kept is not None
            own = self.drafter.found if self._has_drafts and self.drafter is not None else None
            batch = self.ahead_rows.move(batch, self._kept, own)
        graphs = self._graphs_of(command.taps, command.absorbs)
        self._last = batch, graphs(batch).whole(command.reads)

    def _graphs_of(self, taps: tuple[int, ...], absorbs: bool) -> Graphed[Out]:
        key = taps, absorbs
        if key not in self._graphs:
            by_single = absorbs and self.drafter is not None and self.drafter.plan.n_held > 0
            self._graphs[key] = graphs = Graphed(
                lambda batch: self._run(batch, taps, absorbs), by_single=by_single
            )
            if not self.target.capturable:
                graphs.seal()
        return self._graphs[key]

    def _run(self, batch: Batch, taps: tuple[int, ...], absorbs: bool) -> Out:
        out = self.target.run(batch, taps)
        if absorbs:
            assert self.drafter is not None
            self.drafter.absorb(batch, out)
        return out

    def _head_best(self, command: HeadBest) -> None:
        head = shared(self.target.output)
        assert head is not None
        rows = torch.empty(command.n_row, self.target.n_embd, device=self.target.device)
        head.ranks.spread(rows)
        head.best(head.own(rows))

    def _of_pages(self, command: OfPages) -> None:
        size, ranks = self.table.page_size, self.target.ranks
        assert ranks is not None
        if isinstance(command, ResetSlot):
            self.memory.reset(command.slot)
        elif isinstance(command, CopyPage):
            self.memory.copy_page(self.memory.paged, size, command.new, command.old)
        elif isinstance(command, ReadPages):
            deque(shares.gather_pages(self.memory, ranks, size, command.pages), maxlen=0)
        else:
            shares.deal_pages(self.memory, ranks, size, command.pages, None)

    def _of_states(self, command: OfStates) -> None:
        ranks = self.target.ranks
        assert ranks is not None
        # On the host: the first rank's budget counts its own device only
        if isinstance(command, KeepState):
            self.kept_states[command.number] = to_host(
                self.memory.checkpoint(command.slot, command.n_past)
            )
        elif isinstance(command, RestoreState):
            self.memory.restore(command.slot, self.kept_states[command.number])
        elif isinstance(command, ReadState):
            deque(shares.gather_state(ranks, self.kept_states[command.number].tensors), maxlen=0)
        elif isinstance(command, MakeState):
            own = shares.deal_state(self.memory, ranks, command.n_past, None)
            self.kept_states[command.number] = to_host(Checkpoint(command.n_past, own))
        else:
            for number in command.numbers:
                del self.kept_states[number]
