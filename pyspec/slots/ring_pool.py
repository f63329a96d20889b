"""Keys and values of a layer with a window: a ring of pages for each slot, in place of the pages of its whole text.

The token at position p has row p % (n_ring * page_size) of its slot's ring. Seen as pages, page i of the text is page i % n_ring of the
ring, so kernels read rings by a page table of their own (op `ring_places`). They read no key behind a row's window.

A ring has at least `CacheSizes.n_spare` rows besides the window. So no row of a forward overwrites a key that a row of the same forward
sees, and rows of refused drafts overwrite none that is seen after them: a shorter length is enough, and nothing is copied.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from pyspec.errors import OutOfBounds
from pyspec.slots.kv import KVPool, raw
from pyspec.slots.kv_types import KvFormat


class RingPool(KVPool):
    """Planes as of `KVPool`: the rows of each slot's ring, slot by slot, and a null page for the writes of padding.

    n_ring  pages of a ring
    window  rows that a token may see, its own included
    """

    paged: ClassVar[bool] = False

    def __init__(
        self,
        n_slot: int,
        n_ring: int,
        page_size: int,
        window: int,
        n_head: int,
        head_dim: int,
        kv: KvFormat,
        device: torch.device,
    ) -> None:
        super().__init__((n_slot * n_ring + 1) * page_size, n_head, head_dim, kv, device)
        self.n_slot, self.n_ring, self.page_size, self.window = n_slot, n_ring, page_size, window

    @property
    def n_seat(self) -> int:
        """Rows of a slot's ring."""
        return self.n_ring * self.page_size

    @property
    def null_row(self) -> int:
        """The first row behind all rings, for the writes of padding."""
        return self.n_slot * self.n_seat

    @property
    def n_spare(self) -> int:
        """Rows of a slot that one forward may write."""
        return self.n_seat - self.window + 1

    def rows(self, slot: int, first: int, end: int) -> list[slice]:
        """The rows of positions `first` to `end` - 1: one run, or two around the ring's end."""
        if not 0 <= slot < self.n_slot:
            raise OutOfBounds("ring slot", slot, self.n_slot, slot)
        if first < 0 or end - first > self.n_seat:
            raise OutOfBounds(f"slot {slot} rows of a ring", end - first, self.n_seat + 1, slot)
        base, start, n = slot * self.n_seat, first % self.n_seat, end - first
        head = min(n, self.n_seat - start)
        runs = slice(base + start, base + start + head), slice(base, base + n - head)
        return [run for run in runs if run.stop > run.start]

    def page(self, page: int, page_size: int) -> list[Tensor]:
        """Nothing: a ring's pages are no text's."""
        return []

    def saved(self, slot: int, n_past: int) -> tuple[Tensor, ...]:
        """The window before the token at `n_past`, plane by plane."""
        runs = self.rows(slot, max(n_past - self.window, 0), n_past)
        return tuple(raw(plane)[run] for plane in self.planes for run in runs)
