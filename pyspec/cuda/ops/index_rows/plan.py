"""Scratch memory of `index_rows`, for a planner before a load."""

from __future__ import annotations

from pyspec.cuda.ops.index_rows import cuda as index_cuda
from pyspec.cuda.ops.index_rows.ref import IndexSpec


def scratch_bytes(spec: IndexSpec, n_row: int, n_token: int) -> int:
    """Bytes of scores, for `n_row` rows of contexts up to `n_token`."""
    return index_cuda.scratch_bytes(spec, n_row, n_token)
