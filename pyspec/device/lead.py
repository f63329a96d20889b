"""The first rank leads the others: it mirrors each command to its device to them, as plain integers.

A rank runs its share of the model, keeps its share of the slots' memory, and decides nothing. Rows, pages and checkpoints come from the
first rank, in its order. The exchange of tensors is part of the model (cuda/collective.py). Drafters run on the first rank alone, except
for those that ranks divide (`Drafter.is_divided`), and for the head of a block's drafts: each rank reads its part of it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pyspec.cuda.collective import Collective
from pyspec.cuda.graph import Graphed
from pyspec.cuda.ops.ahead.ref import Kept
from pyspec.device import shares
from pyspec.device.commands import (
    AcceptRows,
    Command,
    CopyPage,
    DropStates,
    FoldSlot,
    HeadBest,
    HidePictures,
    KeepState,
    MakeState,
    ReadPages,
    ReadState,
    ResetSlot,
    RestoreState,
    RunForward,
    SealGraphs,
    ShowPicture,
    WritePages,
)
from pyspec.device.worker import Launched, Worker
from pyspec.draft.drafter import Drafter
from pyspec.errors import DeviceError
from pyspec.models.gathered import Gathered
from pyspec.models.target import Out
from pyspec.slots.batch import Batch, Seq
from pyspec.slots.memory import Checkpoint, Keep, Like, Memory
from pyspec.slots.parts import PartMemory
from pyspec.slots.round import ALL, Continuation, LogitsNeed, Round
from pyspec.slots.table import Slot

Send = Callable[[Command], None]


class KeptElsewhere:
    """The other ranks' part of a checkpoint, freed together with the first rank's."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class Leader:
    """Sends commands to the other ranks, and leads their forwards.

    moved   memory of the next forward's batch, if only the first rank's device knows its rows
    moving  rows of the next forward as they were laid out, if every rank moves them behind the rows that it kept
    last    the batch of the last forward
    has_accepted  all ranks have counted the kept rows of that one
    """

    def __init__(self, send: Send, ranks: Collective) -> None:
        self._send, self.ranks = send, ranks
        self.moved: Tensor | None = None
        self.moving: tuple[Seq, ...] | None = None
        self.last: Batch | None = None
        self.has_accepted = False
        self._dropped: deque[int] = deque()  # filled on the thread that frees a checkpoint
        self._n_kept = 0

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
        *,
        absorbs: bool = False,
    ) -> Out:
        """Run a forward on every rank. Logits are gathered after `run`, which a graph may hold."""
        is_moved, moves = self.moved is not None, self.moving is not None
        in_arena = batch.bucket is not None
        rows = tuple(batch.seqs) if self.moving is None else self.moving, tuple(batch.pages)
        self.last, self.has_accepted = batch, False
        prompt = batch.bucket or 0 if batch.prompt else 0
        with self.together(
            RunForward(*rows, tuple(taps), in_arena, is_moved, moves, reads, absorbs, prompt)
        ):
            if self.moved is not None:
                self.ranks.spread(self.moved)
            return run(batch, taps).whole(reads)

    def accept(self, behind: Continuation) -> None:
        """Have the others count the kept rows of the last forward, which this rank does, too."""
        self.send(AcceptRows(behind))
        self.has_accepted = True

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

    def read_pages(self, page_size: int, pages: Sequence[int], keep: Keep = Tensor.cpu) -> list[Tensor]:
        """From every rank."""
        with self.leader.together(ReadPages(tuple(pages))):
            planes = shares.gather_pages(self, self.leader.ranks, page_size, pages)
            return [keep(part) for parts in planes for part in parts]

    def write_pages(self, page_size: int, pages: Sequence[int], content: Iterator[Tensor]) -> None:
        """On every rank."""
        with self.leader.together(WritePages(tuple(pages))):
            shares.deal_pages(self, self.leader.ranks, page_size, pages, content)

    def read_state(self, saved: Checkpoint, keep: Keep = Tensor.cpu) -> list[Tensor]:
        """From every rank."""
        assert isinstance(saved.elsewhere, KeptElsewhere)
        with self.leader.together(ReadState(saved.elsewhere.number)):
            states = shares.gather_state(self.leader.ranks, saved.tensors)
            return [keep(part) for parts in states for part in parts]

    def make_state(self, n_past: int, content: Iterator[Tensor]) -> Checkpoint:
        """On every rank."""
        kept = self.leader.keep()
        with self.leader.together(MakeState(kept.number, n_past)):
            return Checkpoint(n_past, shares.deal_state(self, self.leader.ranks, n_past, content), kept)

    def _of_all(self, own: Sequence[Like]) -> list[Like]:
        return [like for like in own for _ in range(self.leader.ranks.rank.n)]


class TpGraphs(Graphed[Out]):
    """The first rank's forwards, with or without graphs. The others learn of each before it starts, and have graphs of their own.

    reads  results of the next forward that the host needs
    """

    reads: LogitsNeed = ALL

    def __init__(self, worker: Worker, leader: Leader) -> None:
        super().__init__(worker.run, by_single=worker.plan.n_held > 0)
        self.leader, self.taps = leader, worker.plan.taps
        self.absorbs = worker.drafter is not None and worker.drafter.is_divided

    def __call__(self, batch: Batch) -> Out:
        own, reads, self.reads = super().__call__, self.reads, ALL
        return self.leader.forward(lambda b, taps: own(b), batch, self.taps, reads, absorbs=self.absorbs)

    def seal(self) -> None:
        """On every rank."""
        self.leader.send(SealGraphs())
        super().seal()


class TpWorker(Worker):
    """The first rank's worker."""

    @property
    def leader(self) -> Leader:
        """Sends commands to the other ranks."""
        assert isinstance(self.memory, TpMemory)
        return self.memory.leader

    def launch_behind(self, before: Launched, round_: Round) -> Launched | None:
        """Launch a round whose rows each rank moves itself. If only the first one has their drafts, the batch lies in the arena, from which
        the others receive it."""
        leader, behind = self.leader, round_.behind
        assert behind is not None
        is_divided = self.drafter is not None and self.drafter.is_divided
        has_drafts = not behind.n_draft or is_divided
        if before.batch is leader.last and has_drafts:
            leader.moving = round_.seqs
        elif self._is_in_arena(round_):
            assert self.arena is not None
            leader.moved = self.arena.memory
        else:
            return None
        try:
            return super().launch_behind(before, round_)
        finally:
            leader.moved = leader.moving = None

    def accept(self, before: Launched, behind: Continuation) -> Kept:
        """On every rank, if all move their rows."""
        if self.leader.moving is not None:
            self.leader.accept(behind)
        return super().accept(before, behind)

    def _is_in_arena(self, round_: Round) -> bool:
        n_page, widths = max(map(len, round_.pages), default=0), [seq.width for seq in round_.seqs]
        arena = self.arena
        return arena is not None and arena.bucket(widths) is not None and n_page <= arena.n_page

    def _send(self, batch: Batch, reads: LogitsNeed) -> Launched:
        """Launch a forward without logits, if the host does not read them."""
        assert isinstance(self.forward, TpGraphs)
        self.forward.reads = reads
        return super()._send(batch, reads)

    def keeps_logits(self, reads: LogitsNeed) -> bool:
        """Gathered logits have a place of their own."""
        return False

    def use(self, drafter: Drafter | None) -> None:
        """Route forwards through the leader."""
        super().use(drafter)
        self.forward = TpGraphs(self, self.leader)

    def leave(self) -> None:
        """Let go of the other ranks; nothing runs after that. Graphs go first, because they contain sums."""
        assert self.target.ranks is not None and isinstance(self.forward, TpGraphs)
        self.forward.forget()
        if self.drafter is not None:
            self.drafter.forget()
        self.target.ranks.leave()

    def show(self, handle: int, rows: Tensor) -> None:
        """On every rank."""
        if handle in self.shown:
            return
        super().show(handle, rows)
        with self.leader.together(ShowPicture(handle, *rows.shape)):
            self.leader.ranks.spread(self.shown[handle])

    def hide(self, unread: Container[int]) -> None:
        """On every rank."""
        self.leader.send(HidePictures(frozenset(h for h in self.shown if h in unread)))
        super().hide(unread)

    def fold(self, slot: Slot) -> None:
        """On every rank."""
        self.leader.send(FoldSlot(slot.index, slot.n_fold))
        super().fold(slot)
