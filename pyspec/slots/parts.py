"""What a layer keeps for its slots: parts that an architecture declares and a load sizes, plans and allocates.

Three kinds. Rows of a `Paged` part stand in the pages of the slots' texts and go where those go. A `Ring` holds the last rows of
each slot, as many as a window sees and a verify may take back. `Recurrent` state is one value, committed by folding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from pyspec.slots.kv import KVPool, row_bytes, rows_per_page
from pyspec.slots.recurrent import RecurrentShape, StateLayer
from pyspec.slots.ring import RingRows


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """What a load decides for all parts alike.

    n_row     tokens that all pages hold, the null page's included (`SlotTable.n_alloc_row`)
    width     rows of a slot's largest verify
    n_late    rows of a slot that may wait in the records of recurrent layers (Seq.late)
    kv_dtype  of the entries of paged parts
    """

    n_slot: int
    n_row: int
    page_size: int
    width: int
    kv_dtype: torch.dtype
    n_late: int = 0

    @property
    def n_record(self) -> int:
        """Rows that a slot's records have room for."""
        return max(self.width, self.n_late)


class PartMemory(Protocol):
    """The memory of one part, for every slot. It hands out views: `Memory` copies those of all layers in few launches."""

    paged: ClassVar[bool]

    def tensors(self) -> Sequence[Tensor]:
        """Everything that is allocated."""
        ...

    def page(self, page: int, page_size: int) -> Sequence[Tensor]:
        """What stands in a page; nothing if the part is a slot's own."""
        ...

    def saved(self, slot: int, n_past: int) -> Sequence[Tensor]:
        """What a slot needs beside its pages to go on from `n_past` tokens: a checkpoint copies it, a restore brings it back."""
        ...

    def own(self, slot: int) -> Sequence[Tensor]:
        """What a new sequence of the slot finds zero, each in one piece: nothing of the last one is left."""
        ...


class CachePart(Protocol):
    """The declaration of one part. `paged`: it grows with the context, and a shorter text needs nothing beside its pages;
    otherwise it is a slot's own, and what it was at an earlier token is known from a checkpoint only."""

    paged: ClassVar[bool]

    def n_bytes(self, sizes: CacheSizes) -> int:
        """Bytes that `allocate` takes. ModelError if the part can not be kept in these types."""
        ...

    def saved_bytes(self, sizes: CacheSizes) -> int:
        """Bytes of one slot's checkpoint, at most."""
        ...

    def allocate(self, sizes: CacheSizes, device: torch.device) -> PartMemory:
        """The part's memory, zeroed, for every slot."""
        ...


LayerParts = Mapping[str, CachePart]
"""The parts of one layer by name."""


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys and values of attention, one row for every `tokens_per_row` tokens of a page.

    A row that stands for several tokens is made by the last of them and stands in that one's page. So a page is whole without
    its successors, whatever its size; a page in which no row is made has an unused one.
    `keys_only`: the keys are the values, too.
    """

    n_head: int
    head_dim: int
    tokens_per_row: int = 1
    keys_only: bool = False
    paged: ClassVar[bool] = True

    def _n_row(self, s: CacheSizes) -> int:
        return s.n_row // s.page_size * rows_per_page(s.page_size, self.tokens_per_row)

    def n_bytes(self, s: CacheSizes) -> int:
        return self._n_row(s) * row_bytes(self.n_head, self.head_dim, s.kv_dtype) // (1 + self.keys_only)

    def saved_bytes(self, s: CacheSizes) -> int:
        return 0

    def allocate(self, s: CacheSizes, device: torch.device) -> KVPool:
        n, ratio, alone = self._n_row(s), self.tokens_per_row, self.keys_only
        return KVPool(n, self.n_head, self.head_dim, s.kv_dtype, device, tokens_per_row=ratio, keys_only=alone)


@dataclass(frozen=True, slots=True)
class Ring:
    """The last rows of each slot: `window` that the next token may see, and those of a verify.

    rows   dimensions of what a row holds, by name
    dtype  None: that of keys and values, or f16 where those have scales
    slack  how many tokens of a slot may be taken back: all drafts of a verify, and a round that was launched behind it. With so many
           rows beside the window none that is still to be seen is overwritten by a draft, and taking drafts back is lowering the length.
    """

    window: int
    rows: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype | None = torch.float32
    paged: ClassVar[bool] = False

    @staticmethod
    def slack(width: int) -> int:
        """Rows beyond the window: as many as two verifies of `width` rows, one of them launched behind the other, may take back."""
        return 2 * width

    def _dtype(self, s: CacheSizes) -> torch.dtype:
        if self.dtype is not None:
            return self.dtype
        return s.kv_dtype if s.kv_dtype in (torch.float32, torch.float16, torch.bfloat16) else torch.float16

    def _row_bytes(self, s: CacheSizes) -> int:
        return sum(map(prod, self.rows.values())) * self._dtype(s).itemsize

    def n_bytes(self, s: CacheSizes) -> int:
        return s.n_slot * (self.window + self.slack(s.width)) * self._row_bytes(s)

    def saved_bytes(self, s: CacheSizes) -> int:
        return self.window * self._row_bytes(s)

    def allocate(self, s: CacheSizes, device: torch.device) -> RingRows:
        return RingRows(self.rows, s.n_slot, self.window, self.slack(s.width), self._dtype(s), device)


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A state in f32 with the window of its convolution and what a verify records of its rows."""

    shape: RecurrentShape
    paged: ClassVar[bool] = False

    def n_bytes(self, s: CacheSizes) -> int:
        recorded = self.shape.n_channel + sum(map(prod, self.shape.records.values()))
        return s.n_slot * (self.saved_bytes(s) + 4 * s.n_record * recorded)

    def saved_bytes(self, s: CacheSizes) -> int:
        return 4 * (prod(self.shape.state) + (self.shape.n_conv - 1) * self.shape.n_channel)

    def allocate(self, s: CacheSizes, device: torch.device) -> StateLayer:
        return StateLayer(self.shape, s.n_slot, s.n_record, device)
