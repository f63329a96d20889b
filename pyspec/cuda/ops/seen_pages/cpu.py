"""`seen_pages` on CPUs (cpu/native/seen_pages.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda import faults
from pyspec.cuda.ops.seen_pages.ref import GUARD, SeenPages, SeenPagesSpec, as_seen
from pyspec.slots.batch import Batch

_RUN = CpuKernel("pyspec_seen_pages", "10q" + "9q")


def bind(spec: SeenPagesSpec) -> SeenPages:
    def seen_pages(chosen: Tensor, batch: Batch) -> Batch:
        (n_row, top_k), size = chosen.shape, batch.page_size
        assert top_k == spec.top_k and chosen.dtype == torch.int32 and chosen.is_contiguous()
        assert len(batch.positions) == len(batch.row_seq) == n_row
        of, n_page, table = spec.page_of(size), spec.n_page(size), batch.page_table
        pages = empty(n_row, n_page, dtype=torch.int64)
        lo, hi = empty(n_row, dtype=torch.int64), empty(n_row, dtype=torch.int64)
        seqs, starts = empty(n_row, dtype=torch.int32), empty(n_row + 1, dtype=torch.int32)
        given = chosen, table, batch.positions, batch.row_seq, pages, lo, hi, seqs, starts
        sizes = *table.shape, size, spec.ratio, of, top_k, n_page
        _RUN(*given, faults.record(chosen.device), GUARD.number, n_row, *sizes)
        return as_seen(spec, batch, pages, lo, hi, seqs, starts)

    return seen_pages
