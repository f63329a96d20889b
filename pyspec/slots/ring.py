"""The last rows of each slot, in rings: the rows of a sliding window, and rows that are summed up to one of several tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from pyspec.errors import OutOfBounds
from pyspec.slots.mapped import zeros


class RingRows:
    """Rows of one layer for every slot; the token at position p has row p % n_row of its slot's ring.

    rows    by name: [slot, n_row, *dims]
    window  rows that a token may see, its own included
    slack   n_row - window: rows that may be written behind the committed ones and then refused. The next token still finds its
            whole window, and refused rows are overwritten before they are read: nothing is copied
    """

    paged: ClassVar[bool] = False

    def __init__(
        self,
        dims: Mapping[str, tuple[int, ...]],
        n_slot: int,
        window: int,
        slack: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.window, self.slack, self.n_row = window, slack, window + slack
        self.rows = {
            name: zeros((n_slot, self.n_row, *dim), dtype, device) for name, dim in dims.items()
        }

    def _at(self, slot: int, first: int, end: int) -> Tensor:
        """The rows of positions `first` to `end` - 1, at most as many as the ring has."""
        plane = next(iter(self.rows.values()))
        if not 0 <= slot < len(plane):
            raise OutOfBounds("ring slot", slot, len(plane), slot)
        if first < 0 or end - first > self.n_row:
            raise OutOfBounds(f"slot {slot} rows of a ring", end - first, self.n_row + 1, slot)
        return torch.arange(first, end, device=plane.device) % self.n_row

    def write(self, slot: int, n_past: int, rows: Mapping[str, Tensor]) -> None:
        """Write the rows [n, *dims] of `n` tokens from position `n_past` on. If there are more than the ring holds, the last ones stay."""
        for name, new in rows.items():
            end = n_past + len(new)
            kept = new[-self.n_row :]
            at = self._at(slot, end - len(kept), end)
            self.rows[name][slot].index_copy_(0, at, kept)

    def read(self, slot: int, first: int, end: int) -> dict[str, Tensor]:
        """The rows of positions `first` to `end` - 1 in order, at most the ring's number."""
        at = self._at(slot, first, end)
        return {name: plane[slot][at] for name, plane in self.rows.items()}

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.rows.values())

    def page(self, page: int, page_size: int) -> tuple[Tensor, ...]:
        return ()

    def saved(self, slot: int, n_past: int) -> list[Tensor]:
        """The window before the token at `n_past`: of every plane one run of rows, or two around the ring's end."""
        first = max(n_past - self.window, 0)
        start, n = first % self.n_row, n_past - first
        head = min(n, self.n_row - start)
        runs = [run for run in (slice(start, start + head), slice(0, n - head)) if run.stop > run.start]
        return [plane[slot, run] for plane in self.rows.values() for run in runs]

    def own(self, slot: int) -> list[Tensor]:
        return [plane[slot] for plane in self.rows.values()]
