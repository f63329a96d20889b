"""The content of an entry of the disk's prefix cache as host memory, and back into a slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyspec.device.worker import Worker
from pyspec.draft.drafter import PortableDrafter
from pyspec.slots.disk_folder import END, SEGMENT, DiskEntry
from pyspec.slots.memory import Checkpoint, Like, planes_of, write_planes
from pyspec.slots.slot_file import Bytes, SlotFile
from pyspec.slots.states import Saved
from pyspec.slots.table import Slot

ALIGNED = 16  # bytes: tensors of any type may begin at multiples


@dataclass(frozen=True, slots=True)
class KeptText:
    """A text in the prefix tree, whose first `n` tokens are worth keeping. ends: places where entries end besides whole segments."""

    tokens: tuple[int, ...]
    n: int
    ends: tuple[int, ...]


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
    """

    entry: DiskEntry
    first: int
    n_past: int
    content: Bytes
    like: Sequence[Like]
    has_share: bool
    buffer: Bytes | None


@dataclass(frozen=True, slots=True)
class RestoredState:
    """The state behind the pages of a prefix: the target's, and the drafter's share."""

    n_past: int
    checkpoint: Checkpoint | None
    draft: object | None


class EntryCodec:
    """Knows the tensors of entries. `planes` and `put` run on the engine's thread."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.table = worker, worker.table

    @property
    def drafter(self) -> PortableDrafter | None:
        """The drafter, if its share of a state can be stored."""
        drafter = self.worker.drafter
        return drafter if isinstance(drafter, PortableDrafter) else None

    def planes(self) -> list[Tensor]:
        """All paged memory, as [page, row, *dims]."""
        return planes_of(self.worker.pools(), self.table.page_size)

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
            like += self.worker.memory.state_like(n_past)
        if has_share and self.drafter is not None:
            like.append((self.drafter.share_shape, torch.float32))
        return like

    # -- writing -------------------------------------------------------------------------------------------------

    def state_of(self, saved: Saved | None) -> tuple[dict[str, Any], list[Tensor]]:
        """Head and tensors of a state, on any device."""
        drafter, needs_state = self.drafter, self.worker.memory.needs_state
        tensors = list(saved.checkpoint.tensors) if saved is not None and needs_state else []
        share = None if saved is None or drafter is None else saved.draft
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
        """The content of an entry behind segment `i` of a text. Raises BadSlotFile; `buffer` is the caller's then."""
        n_past = i * SEGMENT + entry.n
        has_state, has_share = file.head.get("state", False), file.head.get("share", False)
        if has_state is not (entry.kind == END and self.worker.memory.needs_state) or (
            has_share is not False and (has_share is not True or self.drafter is None)
        ):
            raise file.bad("it has not the state that it should have")
        like = self.like(entry.n, n_past, has_state=has_state, has_share=has_share)
        n_bytes = sum(map(_padded, like))
        (content,) = file.read([n_bytes], buffer)
        if content[: 4 * entry.n].view("<i4").tolist() != list(tokens[n_past - entry.n : n_past]):
            raise file.bad("it has other tokens than its name says")
        first = i * SEGMENT // self.table.page_size
        kept = buffer if buffer is not None and buffer.size >= n_bytes else None
        return Piece(entry, first, n_past, content, like, has_share, kept)

    def put(self, slot: Slot, piece: Piece) -> RestoredState | None:
        """Write an entry's pages into the slot's own pages. Returns its state, if it is an end."""
        self.table.grow(slot, piece.n_past)
        parts = self._parts(piece)
        next(parts)  # tokens
        n_page = self.table.pages_for(piece.entry.n)
        shared = min(max(0, len(slot.nodes) - piece.first), n_page)  # other slots read those
        pages, planes = slot.pages[piece.first + shared : piece.first + n_page], self.planes()
        content = [next(parts)[shared:] for _ in planes]
        if pages:
            write_planes(planes, pages, iter(content))
        if piece.entry.kind != END:
            return None
        checkpoint = draft = None
        if self.worker.memory.needs_state:
            checkpoint = self.worker.memory.make_state(piece.n_past, parts)
        if piece.has_share and self.drafter is not None:
            draft = self.drafter.share_of(piece.n_past, next(parts).clone())
        return RestoredState(piece.n_past, checkpoint, draft)

    def _parts(self, piece: Piece) -> Iterator[Tensor]:
        """Its tensors on the device: one copy brings all."""
        whole = torch.from_numpy(piece.content).to(self.worker.device)
        at = 0
        for shape, dtype in piece.like:
            n = prod(shape) * dtype.itemsize
            yield whole[at : at + n].view(dtype).view(shape)
            at += _padded((shape, dtype))


def _padded(like: Like) -> int:
    shape, dtype = like
    return -(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
