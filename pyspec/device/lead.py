"""The first rank leads the others: it sends each call of its worker, its memory and a divided drafter to them, as plain integers.

Every rank runs the same worker on its share of the model and of the slots' memory (follow.py); only the first one chooses rows, pages and
checkpoints. Tensors are exchanged inside the model (cuda/collective.py), so every rank has the same best tokens, and counts accepted rows itself.
A drafter that ranks divide (`DraftPlan.is_divided`) is called alike on all of them. Any other runs on the first rank alone, which sends its tokens,
and may read the head together with the others.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyspec.cuda.collective import Collective
from pyspec.cuda.graph import Graphed
from pyspec.cuda.ops.ahead.ref import Kept
from pyspec.device import shares
from pyspec.device.follow import Call, SlotNews, title
from pyspec.device.shares import RankWorker
from pyspec.device.worker import Launched
from pyspec.draft.drafter import Drafter
from pyspec.errors import DeviceError
from pyspec.models.gathered import Gathered
from pyspec.models.target import Out
from pyspec.slots.batch import Batch
from pyspec.slots.drafts import DraftRequest, DraftsAhead
from pyspec.slots.memory import Checkpoint, Keep, Like, Memory
from pyspec.slots.parts import PartMemory
from pyspec.slots.round import Round
from pyspec.slots.table import Slot

Send = Callable[[Call], None]

DIVIDED = ("begin", "observe", "draft", "checkpoint", "end", "set_window", "capture", "check")
"""Methods of a divided drafter that every rank calls."""


class KeptElsewhere:
    """The other ranks' part of a checkpoint or a forward, freed together with the first rank's."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class Leader:
    """Sends calls to the other ranks, and leads their forwards."""

    def __init__(self, send: Send, ranks: Collective) -> None:
        self._send, self.ranks = send, ranks
        self._dropped: deque[int] = deque()  # filled on any thread that frees one
        self._n_kept = 0
        self.is_together = False  # in a call that the others run, too

    def send(self, name: str, *args: Any) -> None:
        """Send a call to all other ranks, in order."""
        self._tell(name, args)
        self.ranks.calls.count(name)

    def _tell(self, name: str, args: tuple[Any, ...]) -> None:
        if self._dropped:
            self._send(("drop", tuple(self._dropped.popleft() for _ in range(len(self._dropped)))))
            self.ranks.calls.count("drop")
        self._send((name, args))

    def keep(self) -> KeptElsewhere:
        """A new number for a checkpoint or a forward of the others."""
        self._n_kept += 1
        kept = KeptElsewhere(self._n_kept)
        weakref.finalize(kept, self._dropped.append, kept.number).atexit = False
        return kept

    @contextmanager
    def together(self, name: str, *args: Any) -> Iterator[None]:
        """Have the others run a call beside the body. An exception in the body ends all ranks, because they wait for its part. In the body of
        another one nothing is sent: they come to this call by themselves."""
        if self.is_together:
            yield
            return
        what = title((name, args))
        self._tell(name, args)
        self.is_together = True
        try:
            with self.ranks.calls.within(what):
                yield
        except DeviceError:
            raise
        except Exception as e:
            raise DeviceError(f"{what} failed on the first rank, and the others wait in it: {e}") from e
        finally:
            self.is_together = False

    def forward(
        self, run: Callable[[Batch, Sequence[int]], Out], batch: Batch, taps: Sequence[int]
    ) -> Out:
        """A forward of the target alone, on every rank."""
        with self.together("run_target", tuple(batch.seqs), tuple(batch.pages), tuple(taps)):
            return run(batch, taps).whole()

    def best(self, head: Gathered, rows: Tensor) -> Tensor:
        """[row] int64: the best token of each row [row, n_embd] f32 of a drafter, found by all ranks. Only this rank has the rows."""
        assert rows.dtype == torch.float32
        rows = rows.contiguous()
        with self.together("find_best", len(rows)):
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
        self.leader.send("reset", slot)
        super().reset(slot)

    def checkpoint(self, slot: int, n_past: int) -> Checkpoint:
        """On every rank; the result refers to the others' parts."""
        kept = self.leader.keep()
        self.leader.send("keep_state", kept.number, slot, n_past)
        saved = super().checkpoint(slot, n_past)
        saved.elsewhere = kept
        return saved

    def restore(self, slot: int, saved: Checkpoint) -> None:
        """On every rank."""
        self.leader.send("restore_state", number_of(saved), slot)
        super().restore(slot, saved)

    def copy_page(self, parts: Sequence[PartMemory], page_size: int, new: int, old: int) -> None:
        """On every rank."""
        self.leader.send("copy_page", new, old)
        super().copy_page(parts, page_size, new, old)

    def pages_like(self, page_size: int, n_page: int) -> list[Like]:
        """Of every rank."""
        return self._of_all(super().pages_like(page_size, n_page))

    def state_like(self, n_past: int) -> list[Like]:
        """Of every rank."""
        return self._of_all(super().state_like(n_past))

    def read_pages(self, page_size: int, pages: Sequence[int], keep: Keep = Tensor.cpu) -> list[Tensor]:
        """From every rank."""
        with self.leader.together("read_pages", tuple(pages)):
            planes = shares.gather_pages(self, self.leader.ranks, page_size, pages)
            return [keep(part) for parts in planes for part in parts]

    def write_pages(self, page_size: int, pages: Sequence[int], content: Iterator[Tensor]) -> None:
        """On every rank."""
        with self.leader.together("write_pages", tuple(pages)):
            shares.deal_pages(self, self.leader.ranks, page_size, pages, content)

    def read_state(self, saved: Checkpoint, keep: Keep = Tensor.cpu) -> list[Tensor]:
        """From every rank."""
        with self.leader.together("read_state", number_of(saved)):
            states = shares.gather_state(self.leader.ranks, saved.tensors)
            return [keep(part) for parts in states for part in parts]

    def make_state(self, n_past: int, content: Iterator[Tensor]) -> Checkpoint:
        """On every rank."""
        kept = self.leader.keep()
        with self.leader.together("make_state", kept.number, n_past):
            return Checkpoint(n_past, shares.deal_state(self, self.leader.ranks, n_past, content), kept)

    def _of_all(self, own: Sequence[Like]) -> list[Like]:
        return [like for like in own for _ in range(self.leader.ranks.rank.n)]


class TpGraphs(Graphed[Out]):
    """The first rank's forwards, with or without graphs. The others learn of each before it starts, and have graphs of their own."""

    def __init__(self, worker: TpWorker) -> None:
        super().__init__(worker.run, by_single=worker.plan.n_held > 0)
        self.leader = worker.leader

    def __call__(self, batch: Batch) -> Out:
        run = super().__call__
        if self.leader.is_together:  # in a round, whose results are gathered behind it
            return run(batch)
        in_arena, prompt = batch.bucket is not None, batch.bucket or 0 if batch.prompt else 0
        rows = tuple(batch.seqs), tuple(batch.pages)
        with self.leader.together("run_batch", *rows, in_arena, prompt):
            return run(batch).whole()

    def seal(self) -> None:
        """On every rank."""
        self.leader.send("seal")
        super().seal()


class TpWorker(RankWorker):
    """The first rank's worker.

    launched  forwards that are not freed, by their numbers
    """

    @property
    def leader(self) -> Leader:
        """Sends calls to the other ranks."""
        assert isinstance(self.memory, TpMemory)
        return self.memory.leader

    def use(self, drafter: Drafter | None) -> None:
        """Set the drafter, and route forwards and a divided drafter through the leader."""
        super().use(drafter)
        self.launched: weakref.WeakValueDictionary[int, Launched] = weakref.WeakValueDictionary()
        self._sent: dict[int, SlotNews] = {}
        self.forward = TpGraphs(self)
        if drafter is not None and self.plan.is_divided:
            for name in DIVIDED:
                setattr(drafter, name, partial(self._call, name, getattr(type(drafter), name), drafter))

    # -- rounds --------------------------------------------------------------------------------------------------

    def launch(self, round_: Round) -> Launched:
        """On every rank."""
        kept = self.leader.keep()
        with self.leader.together("launch", round_, kept.number):
            return self._numbered(super().launch(round_), kept)

    def launch_behind(self, before: Launched, round_: Round) -> Launched | None:
        """On every rank: those that have a share of the drafter make the drafts together."""
        if not self.plan.is_divided:
            return super().launch_behind(before, round_)
        for seq in round_.seqs:
            slot = self.table.slots[seq.slot]
            most = max(slot.n_past, seq.n_past) + seq.slack + self.plan.overhang
            self.table.reach(slot, slot.n_past, most)
        kept = self.leader.keep()
        with self.leader.together("launch_behind", number_of(before), round_, kept.number, self._news()):
            launched = super().launch_behind(before, round_)
            return None if launched is None else self._numbered(launched, kept)

    def _go_on(
        self,
        before: Launched,
        round_: Round,
        kept: Kept,
        drafts: DraftsAhead | None,
        began: torch.cuda.Event | None,
    ) -> Launched:
        if self.plan.is_divided:
            return super()._go_on(before, round_, kept, drafts, began)
        numbered = self.leader.keep()
        with self.leader.together("launch_behind", number_of(before), round_, numbered.number, ()):
            if drafts is not None:
                self.ranks.spread(drafts.tokens.contiguous())
            return self._numbered(super()._go_on(before, round_, kept, drafts, began), numbered)

    def _numbered(self, launched: Launched, kept: KeptElsewhere) -> Launched:
        launched.elsewhere, self.launched[kept.number] = kept, launched
        return launched

    # -- a divided drafter ---------------------------------------------------------------------------------------

    def _call(self, name: str, method: Callable[..., Any], drafter: Drafter, *args: Any) -> Any:
        """A method of the drafter, on every rank. Pages that it will write are held before, because the others hold none."""
        plain: tuple[Any, ...] = args
        if name == "observe":
            batch, kept, out = args
            number = next(n for n, launched in self.launched.items() if launched.out is out)
            plain = number, tuple(batch.seqs), tuple(batch.starts), tuple(kept)
        elif name == "draft":
            live: list[DraftRequest] = [r for r in args[0] if r.n_draft > 0]
            for r in live:
                self.table.reach(r.slot, r.slot.n_past, r.slot.n_past + self.plan.overhang)
            plain = ([(r.slot.index, r.anchor, r.n_draft, r.tells) for r in args[0]],)
        elif name == "check":
            _, slot, tokens = args
            self.table.reach(slot, 0, len(tokens) + self.plan.overhang)
            plain = slot.index, tuple(tokens)
        elif args:
            plain = args[0].index, *args[1:]
        with self.leader.together("draft", name, self._news(), plain):
            return method(drafter, *args)

    def _news(self) -> tuple[SlotNews, ...]:
        """The slots that have changed since the last call."""
        news = []
        for slot in self.table.slots:
            pages, old = self.table.reach(slot, 0, 0), self._sent.get(slot.index)
            is_same = old is not None and old.pages is pages
            if (
                is_same
                and old is not None
                and (old.generation, old.n_past) == (slot.generation, slot.n_past)
            ):
                continue
            self._sent[slot.index] = SlotNews(slot.index, slot.generation, slot.n_past, pages)
            news.append(SlotNews(slot.index, slot.generation, slot.n_past, None if is_same else pages))
        return tuple(news)

    # -- the rest ------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Let go of the other ranks; nothing runs after that. Graphs go first, because they contain sums."""
        self.forward.forget()
        if self.drafter is not None:
            self.drafter.forget()
        self.ranks.leave()

    def show(self, handle: int, rows: Tensor) -> None:
        """On every rank."""
        if handle in self.shown:
            return
        super().show(handle, rows)
        with self.leader.together("show_rows", handle, *rows.shape):
            self.ranks.spread(self.shown[handle])

    def hide(self, unread: Container[int]) -> None:
        """On every rank."""
        self.leader.send("hide_rows", frozenset(h for h in self.shown if h in unread))
        super().hide(unread)

    def fold(self, slot: Slot) -> None:
        """On every rank."""
        self.leader.send("fold_slot", slot.index, slot.n_fold)
        super().fold(slot)


def number_of(kept: Checkpoint | Launched) -> int:
    """The number under which other ranks keep it."""
    assert isinstance(kept.elsewhere, KeptElsewhere)
    return kept.elsewhere.number
