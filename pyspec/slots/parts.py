"""The memory that a layer keeps for its slots, in parts: declared by an architecture; sized and planned by a load, and allocated by `memory.py`.

There are three kinds. Rows of a `Paged` part are stored in the pages of the slots' texts; with a window each slot may have a ring of
pages instead (`RingPages`). A `Ring` holds the last rows of each slot: those of a window, and those that a verify may take back.
`Recurrent` state is one value, committed by folding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from pyspec.slots.kv_types import KvFormat, floats_of, key_bytes, row_bytes

KV, STATE = "kv", "state"  # names of the parts that attention and recurrences read


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Sizes that a load sets for all parts.

    n_row     tokens that all pages hold, the null page's included (`SlotTable.n_alloc_row`)
    width     rows of a slot's largest verify
    n_late    rows of a slot that may wait in the records of recurrent layers (SeqMode.LATE)
    kv       types of keys and values, the entries of paged parts
    n_chunk  most rows of a slot in one forward; 0: unknown, and layers with windows keep the pages of the whole text
    """

    n_slot: int
    n_row: int
    page_size: int
    width: int
    kv: KvFormat
    n_late: int = 0
    n_chunk: int = 0

    @property
    def n_spare(self) -> int:
        """Rows of a slot that one forward may write, or that two verifies may take back, one launched behind the other."""
        return max(2 * self.width, self.n_chunk)

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


class RecurrentShape(Protocol):
    """The shape of a recurrent layer's memory for a slot, of any recurrence."""

    @property
    def n_conv(self) -> int:
        """Taps of the convolution."""
        ...

    @property
    def n_channel(self) -> int:
        """Channels of the convolution."""
        ...

    @property
    def state(self) -> tuple[int, ...]:
        """Dimensions of the state."""
        ...

    @property
    def records(self) -> Mapping[str, tuple[int, ...]]:
        """Dimensions of a row's records, by name: enough to fold the row later."""
        ...


class CachePart(Protocol):
    """The declaration of one part.

    paged: it grows with the context, and a shorter text needs nothing beside its pages. Otherwise it is a slot's own, and only a checkpoint
    has its value at an earlier token.
    """

    paged: ClassVar[bool]

    def n_bytes(self, sizes: CacheSizes) -> int:
        """Bytes of its memory for every slot. Raises ModelError if these types are not supported."""
        ...

    def saved_bytes(self, sizes: CacheSizes) -> int:
        """Most bytes of one slot's checkpoint."""
        ...

    def kept(self, sizes: CacheSizes) -> CachePart:
        """The part that a load with these sizes allocates in its place."""
        ...


LayerParts = Mapping[str, CachePart]
"""The parts of one layer by name."""

WORTH = 0.75  # share of the whole text's rows below which a ring is chosen: the cache continues it at checkpoints only
N_KEPT = 2  # windows of a slot beside its ring: of its checkpoint, and of a start


def kept(layers: Sequence[LayerParts], sizes: CacheSizes) -> list[LayerParts]:
    """The parts of these layers as a load with these sizes makes them: windows in rings, where those are smaller than the text."""
    return [{name: part.kept(sizes) for name, part in layer.items()} for layer in layers]


def rows_per_page(page_size: int, tokens_per_row: int) -> int:
    """Rows of a page, if every `tokens_per_row` tokens have one."""
    return -(-page_size // tokens_per_row)


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys and values of attention, one row for every `tokens_per_row` tokens of a page.

    The last of these tokens makes the row, in its own page. So a page is complete without its successors, at any size; a page with no
    such token has an unused row.
    keys_only: the keys are the values, too.
    as_floats: rows are never codes (`KvFormat.floats`).
    window: a row sees the last tokens, this many with its own; 0: all.
    """

    n_head: int
    head_dim: int
    tokens_per_row: int = 1
    keys_only: bool = False
    window: int = 0
    as_floats: bool = False
    paged: ClassVar[bool] = True

    def kv(self, s: CacheSizes) -> KvFormat:
        """The types of its rows."""
        return s.kv.floats if self.as_floats else s.kv

    def n_row(self, s: CacheSizes) -> int:
        """Rows of all pages."""
        return s.n_row // s.page_size * rows_per_page(s.page_size, self.tokens_per_row)

    def n_bytes(self, s: CacheSizes) -> int:
        of_row = key_bytes if self.keys_only else row_bytes
        return self.n_row(s) * of_row(self.n_head, self.head_dim, self.kv(s))

    def saved_bytes(self, s: CacheSizes) -> int:
        return 0

    def kept(self, s: CacheSizes) -> CachePart:
        if not (s.n_chunk and self.window) or self.tokens_per_row > 1 or self.keys_only:
            return self
        ring = RingPages(self)
        n_row = s.n_slot * (ring.n_page(s) * s.page_size + N_KEPT * self.window)
        return ring if n_row <= WORTH * s.n_row else self


@dataclass(frozen=True, slots=True)
class RingPages:
    """Keys and values of attention over a window: a ring of pages for each slot, whatever the length of its text (`RingPool`)."""

    of: Paged
    paged: ClassVar[bool] = False

    def n_page(self, s: CacheSizes) -> int:
        """Pages of a slot's ring: they hold the window of the first row of a forward, and all that may be written behind it."""
        return -(-(self.of.window + s.n_spare) // s.page_size)

    def n_bytes(self, s: CacheSizes) -> int:
        n_row = (s.n_slot * self.n_page(s) + 1) * s.page_size
        return n_row * row_bytes(self.of.n_head, self.of.head_dim, s.kv)

    def saved_bytes(self, s: CacheSizes) -> int:
        return self.of.window * row_bytes(self.of.n_head, self.of.head_dim, s.kv)

    def kept(self, s: CacheSizes) -> CachePart:
        return self


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

    def dtype_of(self, s: CacheSizes) -> torch.dtype:
        """The dtype of its rows in a load."""
        if self.dtype is not None:
            return self.dtype
        return floats_of(s.kv.k).dtype

    def _row_bytes(self, s: CacheSizes) -> int:
        return sum(map(prod, self.rows.values())) * self.dtype_of(s).itemsize

    def n_bytes(self, s: CacheSizes) -> int:
        return s.n_slot * (self.window + self.slack(s.width)) * self._row_bytes(s)

    def saved_bytes(self, s: CacheSizes) -> int:
        return self.window * self._row_bytes(s)

    def kept(self, s: CacheSizes) -> CachePart:
        return self


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

    def kept(self, s: CacheSizes) -> CachePart:
        return self
