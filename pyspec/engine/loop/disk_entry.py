"""The content of an entry of the disk's prefix cache as host memory, and back into a slot."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyspec.device.worker import Worker
from pyspec.draft.drafter import Drafter
from pyspec.slots.disk_folder import END, SEGMENT, DiskEntry
from pyspec.slots.memory import Checkpoint, Like, Memory, planes_of, write_planes
from pyspec.slots.parts import PartMemory
from pyspec.slots.slot_file import Bytes, SlotFile
from pyspec.slots.states import PIECE, page_locked, to_host
from pyspec.slots.table import Slot, SlotTable

ALIGNED = 16  # bytes: tensors of any type may begin at multiples


@dataclass(frozen=True, slots=True)
class KeptText:
    """A text in the prefix tree, whose first `n` tokens are worth keeping. ends: places where entries end besides whole segments."""

    tokens: tuple[int, ...]
    n: int
    ends: tuple[int, ...]
    salt: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class WantedEntry:
    """An entry that the folder lacks. at: tokens of the text up to its end; used: when the text was, in nanoseconds."""

    text: KeptText
    at: int
    entry: DiskEntry
    used: int


@dataclass(frozen=True, slots=True)
class Piece:
    """An entry's content in host memory, checked.

    first    index in the text of its first page
    n_past   tokens of the text up to its end
    content  [n] uint8: the tensors of `like`, each at a multiple of ALIGNED
    buffer   the reader's memory that holds it, to be given back; None: its own
    number   under which the other ranks have their shares; -1: there are none
    """

    entry: DiskEntry
    first: int
    n_past: int
    content: Bytes
    like: Sequence[Like]
    has_share: bool
    buffer: Bytes | None
    number: int = -1


@dataclass(frozen=True, slots=True)
class PageRun:
    """The pages that a piece goes to, behind the first `shared` ones of it, which other slots read."""

    shared: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class RestoredState:
    """The state behind the pages of a prefix: the target's, and the drafter's share."""

    n_past: int
    checkpoint: Checkpoint | None
    draft: object | None


class EntryCodec:
    """Knows the tensors of this rank's files of entries. `planes` and `fill` run on the engine's thread.

    pools        all paged memory, which may change with the drafter
    get_drafter  the drafter, if this rank has one
    """

    def __init__(
        self,
        memory: Memory,
        table: SlotTable,
        device: torch.device,
        pools: Callable[[], Sequence[PartMemory]],
        get_drafter: Callable[[], Drafter | None],
    ) -> None:
        self.memory, self.table, self.device = memory, table, device
        self._pools, self._get_drafter = pools, get_drafter

    @classmethod
    def of(cls, worker: Worker) -> EntryCodec:
        """For the rank that decides."""
        return cls(worker.memory, worker.table, worker.device, worker.pools, lambda: worker.drafter)

    @property
    def drafter(self) -> Drafter | None:
        """The drafter, if its share of a state can be stored."""
        drafter = self._get_drafter()
        return drafter if drafter is not None and drafter.has_share else None

    def host(self, n_byte: int) -> Bytes:
        """Host memory from which the device reads fast."""
        if self.device.type == "cuda":
            return page_locked(n_byte).numpy()
        return torch.empty(n_byte, dtype=torch.uint8).numpy()

    def planes(self) -> list[Tensor]:
        """All paged memory, as [page, row, *dims]."""
        return planes_of(self._pools(), self.table.page_size)

    def taken(self, pages: Sequence[int]) -> list[Tensor]:
        """These pages of all paged memory, copied on their devices."""
        at = torch.tensor(pages, dtype=torch.int64)
        return [plane[at.to(plane.device)] for plane in self.planes()]

    @property
    def segment_bytes(self) -> int:
        """Bytes of a whole segment's content."""
        return sum(map(_padded, self._like(SEGMENT)))

    def _like(self, n: int) -> list[Like]:
        """Tokens, and the pages that hold `n` tokens."""
        n_page = self.table.pages_for(n)
        planes = [((n_page, *p.shape[1:]), p.dtype) for p in self.planes()]
        return [((n,), torch.int32), *planes]

    def like(self, n: int, n_past: int, *, has_state: bool, has_share: bool) -> list[Like]:
        """Shapes and types of an entry of `n` tokens."""
        like = self._like(n)
        if has_state:
            like += [(tuple(t.shape), t.dtype) for t in self.memory.saved_like(n_past)]
        if has_share and self.drafter is not None:
            like.append((self.drafter.share_shape, torch.float32))
        return like

    # -- writing -------------------------------------------------------------------------------------------------

    def state_of(
        self, checkpoint: Checkpoint | None, draft: object | None
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """Head and tensors of a state, on any device. draft: the drafter's share."""
        drafter, needs_state = self.drafter, self.memory.needs_state
        tensors = list(checkpoint.tensors) if checkpoint is not None and needs_state else []
        share = None if drafter is None else draft
        if share is not None and drafter is not None:
            tensors.append(drafter.share_tensor(share).float())
        return {"state": needs_state, "share": share is not None}, tensors

    @staticmethod
    def pieces(tokens: Sequence[int], tensors: Sequence[Tensor]) -> list[Bytes]:
        """The content of a file, of tensors in host memory."""
        found: list[Bytes] = []
        for t in (torch.tensor(tokens, dtype=torch.int32), *tensors):
            data = t.contiguous().view(-1).view(torch.uint8).numpy()
            found += [data, np.zeros(-data.size % ALIGNED, np.uint8)]
        return found

    # -- reading -------------------------------------------------------------------------------------------------

    def read(
        self, file: SlotFile, entry: DiskEntry, i: int, tokens: Sequence[int], buffer: Bytes | None
    ) -> Piece:
        """The content of an entry behind segment `i` of a text, which has these tokens there. Raises BadSlotFile; `buffer` is the caller's then."""
        n_past = i * SEGMENT + entry.n
        has_state, has_share = file.head.get("state", False), file.head.get("share", False)
        if has_state is not (entry.kind == END and self.memory.needs_state) or (
            has_share is not False and (has_share is not True or self.drafter is None)
        ):
            raise file.bad("it has not the state that it should have")
        like = self.like(entry.n, n_past, has_state=has_state, has_share=has_share)
        n_bytes = sum(map(_padded, like))
        (content,) = file.read([n_bytes], buffer)
        if content[: 4 * entry.n].view("<i4").tolist() != list(tokens):
            raise file.bad("it has other tokens than its name says")
        first = i * SEGMENT // self.table.page_size
        kept = buffer if buffer is not None and buffer.size >= n_bytes else None
        return Piece(entry, first, n_past, content, like, has_share, kept)

    def place(self, slot: Slot, piece: Piece) -> PageRun:
        """The slot's own pages for an entry."""
        self.table.grow(slot, piece.n_past)
        n_page = self.table.pages_for(piece.entry.n)
        shared = min(max(0, len(slot.nodes) - piece.first), n_page)
        return PageRun(shared, tuple(slot.pages[piece.first + shared : piece.first + n_page]))

    def fill(self, piece: Piece, run: PageRun, elsewhere: object = None) -> RestoredState | None:
        """Write an entry's pages. Returns its state, if it is an end; elsewhere: the other ranks' part of that."""
        parts = self._parts(piece)
        next(parts)  # tokens
        planes = self.planes()
        content = [next(parts)[run.shared :] for _ in planes]
        if run.pages:
            write_planes(planes, run.pages, iter(content))
        if piece.entry.kind != END:
            return None
        checkpoint = draft = None
        if self.memory.needs_state:
            checkpoint = self.memory.make_own_state(piece.n_past, parts, elsewhere)
        if piece.has_share and self.drafter is not None:
            draft = self.drafter.share_of(piece.n_past, next(parts).clone())
        return RestoredState(piece.n_past, checkpoint, draft)

    def _parts(self, piece: Piece) -> Iterator[Tensor]:
        """Its tensors on the device: one copy brings all."""
        whole = torch.from_numpy(piece.content).to(self.device)
        at = 0
        for shape, dtype in piece.like:
            n = prod(shape) * dtype.itemsize
            yield whole[at : at + n].view(dtype).view(shape)
            at += _padded((shape, dtype))


def host_copies(tensors: list[Tensor]) -> Generator[None, None, list[Tensor]]:
    """Start the copies of tensors to host memory, and pause behind each piece of PIECE bytes. Those in host memory cost nothing."""
    here: list[Tensor] = []
    while tensors:
        n_taken = _within(tensors, PIECE)
        here += to_host(tensors[:n_taken])
        tensors = tensors[n_taken:]
        if tensors:
            yield
    return here


def _within(tensors: Sequence[Tensor], most: int) -> int:
    """Number of tensors, one at least, that have at most so many bytes together."""
    n_bytes = 0
    for i, t in enumerate(tensors):
        n_bytes += t.numel() * t.element_size() if t.device.type != "cpu" else 0
        if i and n_bytes > most:
            return i
    return len(tensors)


def _padded(like: Like) -> int:
    shape, dtype = like
    return -(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
