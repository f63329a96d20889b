"""`index_rows`: the compressed rows that a token attends to."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.index_rows import cuda as index_cuda
from pyspec.cuda.ops.index_rows import ref as index_ref
from pyspec.cuda.ops.index_rows.cases import check


def shapes(device: torch.device) -> list[index_ref.IndexSpec]:
    """DeepSeek-V4-Flash."""
    return [index_ref.IndexSpec(device, 64, 128, 512, 4, torch.float16, 64)]


def scratch(spec: index_ref.IndexSpec, n_row: int, n_token: int) -> int:
    """A copy of its queries, and on a GPU scores while it runs."""
    scores = index_cuda.scratch_bytes(spec, n_row, n_token) if spec.device.type == "cuda" else 0
    return n_row * 4 * spec.n_head * spec.dim + scores


index_rows: Op[index_ref.IndexSpec, index_ref.IndexRows] = Op(
    "index_rows",
    Impl("torch", index_ref.bind),
    [Impl("cuda", index_cuda.bind, index_cuda.limits, capturable=True, programs=index_cuda.programs)],
    check,
    guard=index_ref.GUARD,
    shapes=shapes,
    scratch=scratch,
)
