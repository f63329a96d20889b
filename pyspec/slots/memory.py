"""The memory that slots keep between rounds: the parts of all layers (parts.py), and their checkpoints.

Everything is allocated once, at load. A page is written only by the slot that holds it, other memory only by its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from pyspec.slots.kv import KvFormat, KVPool, raw
from pyspec.slots.kv_types import PLAIN
from pyspec.slots.mapped import empty_like
from pyspec.slots.parts import KV as KV
from pyspec.slots.parts import STATE as STATE
from pyspec.slots.parts import (
    CachePart,
    CacheSizes,
    LayerParts,
    Paged,
    PartMemory,
    Recurrent,
    Ring,
    RingPages,
    kept,
)
from pyspec.slots.recurrent import StateLayer
from pyspec.slots.ring import RingRows
from pyspec.slots.ring_pool import RingPool

Like = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor
Keep = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Checkpoint:
    """A slot's memory outside pages at exactly `n_past` committed tokens. Immutable once taken."""

    n_past: int
    tensors: list[Tensor]  # in the order of Memory.parts
    elsewhere: object = None  # the other ranks' part


class Memory:
    """All per-slot memory of one model: the parts of its layers, by name.

    kv, states  the parts KV and STATE by layer, which attention and recurrences look up in every round
    is_whole  no other rank keeps a part of it
    n_late    rows of a slot that may wait in records; 0 if no layer has any
    beside    paged memory of a drafter that ranks divide as they divide the model: it is copied and saved with ours
    """

    is_whole: ClassVar[bool] = True

    def __init__(self, layers: Sequence[dict[str, PartMemory]], width: int, n_late: int = 0) -> None:
        self.layers, self.width = layers, width
        self.parts = [part for layer in layers for part in layer.values()]
        self.kv = {i: cast(KVPool, layer[KV]) for i, layer in enumerate(layers) if KV in layer}
        self.states = {
            i: cast(StateLayer, layer[STATE]) for i, layer in enumerate(layers) if STATE in layer
        }
        self.n_late = n_late if self.states else 0
        self.beside: list[PartMemory] = []

    @property
    def kv_format(self) -> KvFormat:
        """The types of keys and values, the same in all layers; f16 if no layer has any."""
        return next((part.kv for part in self.parts if isinstance(part, KVPool)), PLAIN)

    @property
    def paged(self) -> list[PartMemory]:
        """All paged memory."""
        return [*(part for part in self.parts if part.paged), *self.beside]

    @property
    def rings(self) -> dict[int, int]:
        """Rings of pages (ring_pool.py), each size once: pages of a ring, and the null row behind all of them."""
        return {p.n_ring: p.null_row for p in self.parts if isinstance(p, RingPool)}

    @property
    def turns(self) -> list[int]:
        """Rows of all sizes of rings: where a checkpoint's tensors are cut in two depends on them."""
        pools = {part.n_seat for part in self.parts if isinstance(part, RingPool)}
        return sorted(pools | {part.n_row for part in self.parts if isinstance(part, RingRows)})

    @property
    def n_chunk(self) -> int:
        """Most rows of a slot in one forward, so that none overwrites a key that another sees; 0: any number."""
        return min((p.n_spare for p in self.parts if isinstance(p, RingPool)), default=0)

    @property
    def needs_state(self) -> bool:
        """A prefix needs a checkpoint besides its pages."""
        return not all(part.paged for part in self.parts)

    def reset(self, slot: int) -> None:
        """Start a new sequence. On a GPU, few launches serve all layers: two a layer cost a millisecond before a prompt's first token."""
        live = [t for part in self.parts for t in part.own(slot)]
        for at in _by_dtype(live):
            torch._foreach_zero_([live[i] for i in at])

    def saved_like(self, n_past: int) -> list[Tensor]:
        """Tensors with the shapes and types of a checkpoint at `n_past` tokens; their content belongs to slots."""
        return self._saved(0, n_past)

    def _saved(self, slot: int, n_past: int) -> list[Tensor]:
        return [t for part in self.parts for t in part.saved(slot, n_past)]

    def checkpoint(self, slot: int, n_past: int) -> Checkpoint:
        """Copy a slot's state, which must have nothing left to fold: one allocation per dtype, and on a GPU few launches."""
        return Checkpoint(n_past, _copies(self._saved(slot, n_past)))

    def restore(self, slot: int, saved: Checkpoint) -> None:
        """Restore a checkpoint into any slot."""
        _copy(self._saved(slot, saved.n_past), saved.tensors, non_blocking=True)

    # The parts of a record (engine/loop/span.py); with several ranks, each tensor of every rank.

    def pages_like(self, page_size: int, n_page: int) -> list[Like]:
        """Shapes and types of `read_pages` for `n_page` pages."""
        return [((n_page, *plane.shape[1:]), plane.dtype) for plane in planes_of(self.paged, page_size)]

    def state_like(self, n_past: int) -> list[Like]:
        """Shapes and types of `read_state` for a checkpoint at `n_past` tokens."""
        return [(tuple(t.shape), t.dtype) for t in self.saved_like(n_past)]

    def read_pages(self, page_size: int, pages: Sequence[int], keep: Keep = Tensor.cpu) -> list[Tensor]:
        """Copies of these pages of all paged memory, each put where it is wanted by `keep`."""
        return read_planes(planes_of(self.paged, page_size), pages, keep)

    def write_pages(self, page_size: int, pages: Sequence[int], content: Iterator[Tensor]) -> None:
        """Write the result of `read_pages` into these pages."""
        write_planes(planes_of(self.paged, page_size), pages, content)

    def read_state(self, saved: Checkpoint, keep: Keep = Tensor.cpu) -> list[Tensor]:
        """A checkpoint's tensors, each put where it is wanted by `keep`."""
        return [keep(t) for t in saved.tensors]

    def make_state(self, n_past: int, content: Iterator[Tensor]) -> Checkpoint:
        """A checkpoint of the tensors from `read_state`."""
        like = self.saved_like(n_past)
        return Checkpoint(n_past, _copies([next(content) for _ in like], like))

    def copy_page(self, parts: Sequence[PartMemory], page_size: int, new: int, old: int) -> None:
        """Copy page `old` to page `new` of `parts`: our paged memory and any that shares its page numbers."""
        copy_page(parts, page_size, new, old)

    @property
    def kv_bytes(self) -> int:
        """Bytes of paged memory."""
        return _n_bytes(part for part in self.parts if part.paged)

    @property
    def state_bytes(self) -> int:
        """Bytes of other memory."""
        return _n_bytes(part for part in self.parts if not part.paged)


def allocate(layers: Sequence[LayerParts], sizes: CacheSizes, device: torch.device) -> Memory:
    """Allocate all slot memory of a model, zeroed: first paged memory, then the slots' own."""
    layers = kept(layers, sizes)
    made: list[dict[str, PartMemory]] = [{} for _ in layers]
    for paged in (True, False):
        for layer, memory in zip(layers, made, strict=True):
            memory.update(
                {name: memory_of(p, sizes, device) for name, p in layer.items() if p.paged is paged}
            )
    return Memory(made, sizes.width, sizes.n_late)


def memory_of(part: CachePart, s: CacheSizes, device: torch.device) -> Any:
    """The memory of a part for every slot (`PartMemory`), zeroed."""
    match part:
        case Paged(n_head, dim, ratio, alone):
            return KVPool(
                part.n_row(s), n_head, dim, part.kv(s), device, tokens_per_row=ratio, keys_only=alone
            )
        case RingPages(Paged(n_head, dim, window=window)):
            return RingPool(s.n_slot, part.n_page(s), s.page_size, window, n_head, dim, s.kv, device)
        case Ring(window, rows):
            return RingRows(rows, s.n_slot, window, part.slack(s.width), part.dtype_of(s), device)
        case Recurrent(shape):
            return StateLayer(shape, s.n_slot, s.n_record, device)
    raise TypeError(f"no memory is known for {part}")


def copy_page(parts: Iterable[PartMemory], page_size: int, new: int, old: int) -> None:
    """Copy page `old` of every part to page `new`, bit by bit."""
    live = list(parts)
    to, of = ([raw(t) for part in live for t in part.page(page, page_size)] for page in (new, old))
    _copy(to, of)


def planes_of(parts: Iterable[PartMemory], page_size: int) -> list[Tensor]:
    """All paged memory of these parts, as [page, row, *dims]."""
    return [
        raw(plane).unflatten(0, (-1, one.shape[0]))
        for part in parts
        for plane, one in zip(part.tensors(), part.page(0, page_size), strict=True)
    ]


def read_planes(planes: Iterable[Tensor], pages: Sequence[int], keep: Keep) -> list[Tensor]:
    """Copies of these pages of each plane, each put where it is wanted by `keep`."""
    at = torch.tensor(pages, dtype=torch.int64)
    return [keep(plane[at.to(plane.device)]) for plane in planes]


def write_planes(planes: Iterable[Tensor], pages: Sequence[int], content: Iterator[Tensor]) -> None:
    """Write the result of `read_planes` into these pages."""
    at = torch.tensor(pages, dtype=torch.int64)
    for plane in planes:
        plane.index_copy_(0, at.to(plane.device), next(content).to(plane.device))


def _n_bytes(parts: Iterable[PartMemory]) -> int:
    return sum(t.numel() * t.element_size() for part in parts for t in part.tensors())


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the tensors, grouped by dtype."""
    found: dict[torch.dtype, list[int]] = {}
    for i, t in enumerate(tensors):
        found.setdefault(t.dtype, []).append(i)
    return list(found.values())


def _copies(content: Sequence[Tensor], like: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Copies of `content` with the types and device of `like`: one allocation per dtype."""
    live = content if like is None else like
    copies = list(live)
    for at in _by_dtype(live):
        n = [live[i].numel() for i in at]
        for i, piece in zip(at, empty_like(live[at[0]], sum(n)).split(n), strict=True):
            copies[i] = piece.view(live[i].shape)
    _copy(copies, content)
    return copies


def _copy(to: Sequence[Tensor], of: Sequence[Tensor], *, non_blocking: bool = False) -> None:
    """Copy tensors of one dtype together: on a GPU with few launches."""
    for at in _by_dtype(of):
        torch._foreach_copy_([to[i] for i in at], [of[i] for i in at], non_blocking=non_blocking)
