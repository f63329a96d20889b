"""The first rank leads the others: it mirrors each command to its device to them, as plain integers.

A rank runs its share of the model, keeps its share of the slots' memory, and decides nothing. Rows, pages and checkpoints come from the
first rank, in its order. The exchange of tensors is part of the model (cuda/collective.py). Drafters run on the first rank alone, except
for the head of a block's drafts: each rank reads its part of it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyspec.cuda.collective import Collective
from pyspec.cuda.graph import Graphed
from pyspec.cuda.ops.ahead.ref import described
from pyspec.device import shares
from pyspec.device.worker import Launched, Worker
from pyspec.draft.drafter import Drafter
from pyspec.errors import DeviceError
from pyspec.models.gathered import Gathered, shared
from pyspec.models.target import Out, Target
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch, Seq, lay_out
from pyspec.slots.memory import Checkpoint, Like, Memory
from pyspec.slots.parts import PartMemory
from pyspec.slots.round import ALL, LogitsNeed, Round
from pyspec.slots.states import to_host
from pyspec.slots.table import Slot, SlotTable

# -- commands ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunForward:
    """A forward over these rows, in these pages.

    in_arena  a graph may hold it
    is_moved  the first rank's device has moved the rows since they were laid out: receive them from its memory
    reads     gather the logits of all ranks; else the first rank gets each row's best token only
    """

    seqs: tuple[Seq, ...]
    pages: tuple[NDArray[np.int64], ...]
    taps: tuple[int, ...]
    in_arena: bool = False
    is_moved: bool = False
    reads: LogitsNeed = ALL


@dataclass(frozen=True, slots=True)
class HeadBest:
    """Find the best tokens of `n_row` rows of the first rank, with each rank's part of the head."""

    n_row: int


@dataclass(frozen=True, slots=True)
class SealGraphs:
    """Capture no more graphs."""


@dataclass(frozen=True, slots=True)
class FoldSlot:
    """Fold `n_fold` recorded rows into the slot's state."""

    slot: int
    n_fold: int


@dataclass(frozen=True, slots=True)
class ResetSlot:
    """Start a new sequence in a slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class CopyPage:
    """Copy page `old` of every paged part to page `new`."""

    new: int
    old: int


@dataclass(frozen=True, slots=True)
class KeepState:
    """Take a checkpoint of a slot under this number."""

    number: int
    slot: int
    n_past: int


@dataclass(frozen=True, slots=True)
class RestoreState:
    """Restore this checkpoint into a slot."""

    number: int
    slot: int


@dataclass(frozen=True, slots=True)
class ReadPages:
    """Send these pages to the first rank."""

    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WritePages:
    """Receive these pages from the first rank."""

    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadState:
    """Send this checkpoint to the first rank."""

    number: int


@dataclass(frozen=True, slots=True)
class MakeState:
    """Receive a checkpoint from the first rank under this number."""

    number: int
    n_past: int


@dataclass(frozen=True, slots=True)
class DropStates:
    """Forget these checkpoints."""

    numbers: tuple[int, ...]


OfPages = ResetSlot | CopyPage | ReadPages | WritePages
OfStates = KeepState | RestoreState | ReadState | MakeState | DropStates
Command = RunForward | HeadBest | SealGraphs | FoldSlot | OfPages | OfStates
Send = Callable[[Command], None]


# -- the first rank ----------------------------------------------------------------------------------------------


class KeptElsewhere:
    """The other ranks' part of a checkpoint, freed together with the first rank's."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class Leader:
    """Implements `Lead`, and sends commands to the other ranks.

    moved   memory of the next forward's batch, if only the device knows its rows
    """

    def __init__(self, send: Send, ranks: Collective) -> None:
        self._send, self.ranks = send, ranks
        self.moved: Tensor | None = None
        self._dropped: deque[int] = deque()  # filled on the thread that frees a checkpoint
        self._n_kept = 0
        self._is_running = False  # a forward that the others run, too

    def send(self, command: Command) -> None:
        """Send a command to all other ranks, in order."""
        if self._dropped:
            self._send(DropStates(tuple(self._dropped.popleft() for _ in range(len(self._dropped)))))
        self._send(command)

    def keep(self) -> KeptElsewhere:
        """A number for a checkpoint that the others will take."""
        self._n_kept += 1
        kept = KeptElsewhere(self._n_kept)
        weakref.finalize(kept, self._dropped.append, kept.number).atexit = False
        return kept

    @contextmanager
    def together(self, command: Command) -> Iterator[None]:
        """Have the others run a command beside the body. An exception in the body ends all ranks, because they wait for its part."""
        self.send(command)
        try:
            yield
        except DeviceError:
            raise
        except Exception as e:
            name = type(command).__name__
            raise DeviceError(f"{name} failed on the first rank, and the others wait in it: {e}") from e

    def forward(
        self,
        run: Callable[[Batch, Sequence[int]], Out],
        batch: Batch,
        taps: Sequence[int],
        reads: LogitsNeed = ALL,
    ) -> Out:
        """Run a forward on every rank. Logits are gathered after `run`, which a graph may hold."""
        if self._is_running:
            return run(batch, taps)
        is_moved, in_arena = self.moved is not None, batch.bucket is not None
        rows = tuple(batch.seqs), tuple(batch.pages)
        with self.together(RunForward(*rows, tuple(taps), in_arena, is_moved, reads)):
            self._is_running = True
            try:
                if self.moved is not None:
                    self.ranks.spread(self.moved)
                return run(batch, taps).whole(reads)
            finally:
                self._is_running = False

    def best(self, head: Gathered, rows: Tensor) -> Tensor:
        """[row] int64: the best token of each row [row, n_embd] f32 of a drafter, found by all ranks. Only this rank has the rows."""
        assert rows.dtype == torch.float32
        rows = rows.contiguous()
        with self.together(HeadBest(len(rows))):
            self.ranks.spread(rows)
            return head.best(head.own(rows))[0].long()


class TpMemory(Memory):
    """The first rank's memory. It mirrors its methods to the other ranks."""

    is_whole = False

    def __init__(self, own: Memory, leader: Leader) -> None:
        super().__init__(own.layers, own.width, own.n_late)
        self.leader = leader

    def reset(self, slot: int) -> None:
        """On every rank."""
        self.leader.send(ResetSlot(slot))
        super().reset(slot)

    def checkpoint(self, slot: int, n_past: int) -> Checkpoint:
        """On every rank; the result refers to the others' parts."""
        kept = self.leader.keep()
        self.leader.send(KeepState(kept.number, slot, n_past))
        saved = super().checkpoint(slot, n_past)
        saved.elsewhere = kept
        return saved

    def restore(self, slot: int, saved: Checkpoint) -> None:
        """On every rank."""
        assert isinstance(saved.elsewhere, KeptElsewhere)
        self.leader.send(RestoreState(saved.elsewhere.number, slot))
        super().restore(slot, saved)

    def copy_page(self, parts: Sequence[PartMemory], page_size: int, new: int, old: int) -> None:
        """On every rank."""
        self.leader.send(CopyPage(new, old))
        super().copy_page(parts, page_size, new, old)

    def pages_like(self, page_size: int, n_page: int) -> list[Like]:
        """Of every rank."""
        return self._of_all(super().pages_like(page_size, n_page))

    def state_like(self, n_past: int) -> list[Like]:
        """Of every rank."""
        return self._of_all(super().state_like(n_past))

    def read_pages(self, page_size: int, pages: Sequence[int]) -> list[Tensor]:
        """From every rank."""
        with self.leader.together(ReadPages(tuple(pages))):
            planes = shares.gather_pages(self, self.leader.ranks, page_size, pages)
            return [part.cpu() for parts in planes for part in parts]

    def write_pages(self, page_size: int, pages: Sequence[int], content: Iterator[Tensor]) -> None:
        """On every rank."""
        with self.leader.together(WritePages(tuple(pages))):
            shares.deal_pages(self, self.leader.ranks, page_size, pages, content)

    def read_state(self, saved: Checkpoint) -> list[Tensor]:
        """From every rank."""
        assert isinstance(saved.elsewhere, KeptElsewhere)
        with self.leader.together(ReadState(saved.elsewhere.number)):
            return [
                part.cpu()
                for parts in shares.gather_state(self.leader.ranks, saved.tensors)
                for part in parts
            ]

    def make_state(self, n_past: int, content: Iterator[Tensor]) -> Checkpoint:
        """On every rank."""
        kept = self.leader.keep()
        with self.leader.together(MakeState(kept.number, n_past)):
            return Checkpoint(n_past, shares.deal_state(self, self.leader.ranks, n_past, content), kept)

    def _of_all(self, own: Sequence[Like]) -> list[Like]:
        return [like for like in own for _ in range(self.leader.ranks.rank.n)]


class TpGraphs(Graphed[Out]):
    """The first rank's forwards, with or without graphs. The others learn of each before it starts, and have graphs of their own."""

    def __init__(self, worker: Worker, leader: Leader) -> None:
        super().__init__(worker.run, by_single=worker.needs.late)
        self.leader, self.taps = leader, worker.needs.taps

    def __call__(self, batch: Batch, reads: LogitsNeed = ALL) -> Out:
        own = super().__call__
        return self.leader.forward(lambda b, taps: own(b), batch, self.taps, reads)

    def seal(self) -> None:
        """On every rank."""
        self.leader.send(SealGraphs())
        super().seal()


class TpWorker(Worker):
    """The first rank's worker."""

    def launch_behind(self, before: Launched, round_: Round) -> Launched | None:
        """Launch a round whose batch is in the arena, from which the others receive the rows that the device fills in."""
        assert isinstance(self.memory, TpMemory)
        n_page, widths = max(map(len, round_.pages), default=0), [seq.width for seq in round_.seqs]
        if self.arena is None or self.arena.bucket(widths) is None or n_page > self.arena.n_page:
            return None
        leader = self.memory.leader
        leader.moved = self.arena.memory
        try:
            return super().launch_behind(before, round_)
        finally:
            leader.moved = None

    def results(self, batch: Batch, reads: LogitsNeed) -> Out:
        """Results without logits, if the host does not read them."""
        assert isinstance(self.forward, TpGraphs)
        return self.forward(batch, reads)

    def keeps_logits(self, reads: LogitsNeed) -> bool:
        """Gathered logits have a place of their own."""
        return False

    def use(self, drafter: Drafter | None) -> None:
        """Route forwards through the leader."""
        super().use(drafter)
        assert isinstance(self.memory, TpMemory)
        self.forward = TpGraphs(self, self.memory.leader)

    def leave(self) -> None:
        """Let go of the other ranks; nothing runs after that. Graphs go first, because they contain sums."""
        assert self.target.ranks is not None and isinstance(self.forward, TpGraphs)
        self.forward.forget()
        self.target.ranks.leave()

    def fold(self, slot: Slot) -> None:
        """On every rank."""
        assert isinstance(self.memory, TpMemory)
        self.memory.leader.send(FoldSlot(slot.index, slot.n_fold))
        super().fold(slot)


# -- the others --------------------------------------------------------------------------------------------------


class Follower:
    """Any other rank: it runs commands in order.

    table  for the arithmetic of pages only: the first rank knows the slots' requests
    arena  place of batches that the first rank has in its arena: they are padded alike, in a graph or not
    """

    def __init__(
        self, target: Target, memory: Memory, table: SlotTable, arena: Arena | None = None
    ) -> None:
        self.target = target
        self.memory = memory
        self.table = table
        self.arena = arena
        self._graphs: dict[tuple[int, ...], Graphed[Out]] = {}  # by their taps
        self._kept: dict[int, Checkpoint] = {}

    @torch.inference_mode()
    def obey(self, command: Command) -> None:
        """Run one command."""
        if isinstance(command, RunForward):
            self._forward(command)
        elif isinstance(command, HeadBest):
            self._head_best(command)
        elif isinstance(command, SealGraphs):
            for graphs in self._graphs.values():
                graphs.seal()
        elif isinstance(command, FoldSlot):
            for layer in self.memory.states.values():
                layer.fold(layer, command.slot, command.n_fold)
        elif isinstance(command, OfPages):
            self._of_pages(command)
        else:
            self._of_states(command)

    def _forward(self, command: RunForward) -> None:
        arena = self.arena if command.in_arena else None
        batch = lay_out(self.table, command.seqs, self.target.device, pages=command.pages, arena=arena)
        if command.is_moved:
            assert arena is not None and self.target.ranks is not None
            self.target.ranks.spread(arena.memory)
            batch = described(batch)
        if command.taps not in self._graphs:
            self._graphs[command.taps] = graphs = Graphed(
                lambda batch: self.target.run(batch, command.taps)
            )
            if not self.target.capturable:
                graphs.seal()
        self._graphs[command.taps](batch).whole(command.reads)

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
        if isinstance(
            command, KeepState
        ):  # on the host: the first rank's budget counts its own device only
            self._kept[command.number] = to_host(self.memory.checkpoint(command.slot, command.n_past))
        elif isinstance(command, RestoreState):
            self.memory.restore(command.slot, self._kept[command.number])
        elif isinstance(command, ReadState):
            deque(shares.gather_state(ranks, self._kept[command.number].tensors), maxlen=0)
        elif isinstance(command, MakeState):
            own = shares.deal_state(self.memory, ranks, command.n_past, None)
            self._kept[command.number] = to_host(Checkpoint(command.n_past, own))
        else:
            for number in command.numbers:
                del self._kept[number]
