"""Scratch memory of `sparse_attend`, for a planner before a load."""

from __future__ import annotations

from pyspec.cuda.ops.sparse_attend import cuda as sparse_cuda
from pyspec.cuda.ops.sparse_attend.ref import SparseSpec


def scratch_bytes(spec: SparseSpec, n_row: int, n_token: int) -> int:
    """Bytes of parts of rows, for `n_row` rows of contexts up to `n_token`."""
    return sparse_cuda.scratch_bytes(spec, n_row, n_token)
