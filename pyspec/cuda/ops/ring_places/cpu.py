"""`ring_places` on CPUs (cpu/native/ring_places.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.ring_places.ref import RingPlaces, RingPlacesSpec
from pyspec.slots.batch import Batch

_RUN = CpuKernel("pyspec_ring_places", "11q")


def ring_places(batch: Batch, n_ring: int, null_row: int) -> tuple[Tensor, Tensor]:
    n_row, (n_place, n_page) = batch.positions.shape[0], batch.page_table.shape
    assert batch.positions.dtype == torch.int64 and batch.seq_slot.dtype == torch.int32
    assert len(batch.seq_slot) == n_place and len(batch.row_seq) == n_row
    rows = empty(n_row, dtype=torch.int64)
    pages = empty(n_place, n_page, dtype=torch.int64)
    given = batch.positions, batch.row_seq, batch.seq_slot
    _RUN(*given, rows, pages, n_row, n_place, n_page, n_ring, batch.page_size, null_row)
    return rows, pages


def bind(spec: RingPlacesSpec) -> RingPlaces:
    return ring_places
