"""The rows and pages of a batch in rings of pages (slots/ring_pool.py). Reference in plain torch.

The token at position p of a slot has row slot * n_seat + p % n_seat, where n_seat = n_ring * page_size rows are a ring. Page i of its text
is page slot * n_ring + i % n_ring. Rows without a sequence (padding) have the null row. Positions are read on the device, behind `ahead`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.slots.batch import Batch


@dataclass(frozen=True, slots=True)
class RingPlacesSpec:
    """For any batch and any rings."""

    device: torch.device


RingPlaces = Callable[[Batch, int, int], tuple[Tensor, Tensor]]
"""The launch that the op binds, as `ring_places`."""


def ring_places(batch: Batch, n_ring: int, null_row: int) -> tuple[Tensor, Tensor]:
    """(kv_rows [row] int64, page_table [place, page] int64) in place of the batch's own. n_ring: pages of a ring."""
    n_seat, slots = n_ring * batch.page_size, batch.seq_slot.long()
    seat = slots[batch.row_seq.clamp(min=0)] * n_seat
    rows = (seat + batch.positions % n_seat).masked_fill(batch.row_seq < 0, null_row)
    page = torch.arange(batch.page_table.shape[1], device=slots.device) % n_ring
    return rows, slots[:, None] * n_ring + page


def bind(spec: RingPlacesSpec) -> RingPlaces:
    return ring_places
