"""The memory that a layer keeps for its slots, in parts: declared by an architecture; sized, planned and allocated by a load.

There are three kinds. Rows of a `Paged` part are stored in the pages of the slots' texts. A `Ring` holds the last rows of each slot: those
of a window, and those that a verify may take back. `Recurrent` state is one value, committed by folding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from pyspec.slots.kv import KvFormat, KVPool, rows_per_page
from pyspec.slots.kv_types import key_bytes, row_bytes
from pyspec.slots.recurrent import RecurrentShape, StateLayer
from pyspec.slots.ring import RingRows


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Sizes that a load sets for all parts.

    n_row     tokens that all pages hold, the null page's included (`SlotTable.n_alloc_row`)
    width     rows of a slot's largest verify
    n_late    rows of a slot that may wait in the records of recurrent layers (SeqMode.LATE)
    kv       types of keys and values, the entries of paged parts
    """

    n_slot: int
    n_row: int
    page_size: int
    width: int
    kv: KvFormat
    n_late: int = 0

    @property
    def n_record(self) -> int:
        """Rows of a slot's records."""
        return max(self.width, self.n_late)


class PartMemory(Protocol):
    """The memory of one part, for every slot. It returns views, so that `Memory` can copy those of all layers in few launches."""

    paged: ClassVar[bool]

    def tensors(self) -> Sequence[Tensor]:
        """All allocated tensors."""
        ...

    def page(self, page: int, page_size: int) -> Sequence[Tensor]:
        """The content of a page; empty if the part is not paged."""
        ...

    def saved(self, slot: int, n_past: int) -> Sequence[Tensor]:
        """A slot's memory outside pages at `n_past` tokens: checkpoints copy it, restores write it."""
        ...

    def own(self, slot: int) -> Sequence[Tensor]:
        """The memory that a new sequence of the slot needs zeroed, each tensor in one piece."""
        ...


class CachePart(Protocol):
    """The declaration of one part.

    paged: it grows with the context, and a shorter text needs nothing beside its pages. Otherwise it is a slot's own, and only a checkpoint
    has its value at an earlier token.
    """

    paged: ClassVar[bool]

    def n_bytes(self, sizes: CacheSizes) -> int:
        """Bytes of `allocate`. Raises ModelError if these types are not supported."""
        ...

    def saved_bytes(self, sizes: CacheSizes) -> int:
        """Most bytes of one slot's checkpoint."""
        ...

    def allocate(self, sizes: CacheSizes, device: torch.device) -> PartMemory:
        """The part's memory, zeroed, for every slot."""
        ...


LayerParts = Mapping[str, CachePart]
"""The parts of one layer by name."""


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys and values of attention, one row for every `tokens_per_row` tokens of a page.

    The last of these tokens makes the row, in its own page. So a page is complete without its successors, at any size; a page with no
    such token has an unused row.
    keys_only: the keys are the values, too.
    """

    n_head: int
    head_dim: int
    tokens_per_row: int = 1
    keys_only: bool = False
    paged: ClassVar[bool] = True

    def _n_row(self, s: CacheSizes) -> int:
        return s.n_row // s.page_size * rows_per_page(s.page_size, self.tokens_per_row)

    def n_bytes(self, s: CacheSizes) -> int:
        of_row = key_bytes if self.keys_only else row_bytes
        return self._n_row(s) * of_row(self.n_head, self.head_dim, s.kv)

    def saved_bytes(self, s: CacheSizes) -> int:
        return 0

    def allocate(self, s: CacheSizes, device: torch.device) -> KVPool:
        n, ratio, alone = self._n_row(s), self.tokens_per_row, self.keys_only
        return KVPool(n, self.n_head, self.head_dim, s.kv, device, tokens_per_row=ratio, keys_only=alone)


@dataclass(frozen=True, slots=True)
class Ring:
    """The last rows of each slot: the `window` that the next token may see, and those of a verify.

    rows   dimensions of a row, by name
    dtype  None: that of keys, or f16 if those are no floats
    slack  tokens of a slot that may be taken back: all drafts of a verify, and a round that was launched behind it. With this many
           rows beyond the window, no draft overwrites a visible row, and taking drafts back only lowers the length
    """

    window: int
    rows: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype | None = torch.float32
    paged: ClassVar[bool] = False

    @staticmethod
    def slack(width: int) -> int:
        """Rows beyond the window: those that two verifies of `width` rows may take back, one launched behind the other."""
        return 2 * width

    def _dtype(self, s: CacheSizes) -> torch.dtype:
        if self.dtype is not None:
            return self.dtype
        return s.kv.k.dtype if s.kv.k.is_float else torch.float16

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
    """A state in f32, the window of its convolution, and a verify's records of its rows."""

    shape: RecurrentShape
    paged: ClassVar[bool] = False

    def n_bytes(self, s: CacheSizes) -> int:
        recorded = self.shape.n_channel + sum(map(prod, self.shape.records.values()))
        return s.n_slot * (self.saved_bytes(s) + 4 * s.n_record * recorded)

    def saved_bytes(self, s: CacheSizes) -> int:
        return 4 * (prod(self.shape.state) + (self.shape.n_conv - 1) * self.shape.n_channel)

    def allocate(self, s: CacheSizes, device: torch.device) -> StateLayer:
        return StateLayer(self.shape, s.n_slot, s.n_record, device)
