"""`sparse_attend`: a window of raw rows and chosen compressed ones under one softmax."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.sparse_attend import cuda as sparse_cuda
from pyspec.cuda.ops.sparse_attend import ref as sparse_ref
from pyspec.cuda.ops.sparse_attend.cases import check


def shapes(device: torch.device) -> list[sparse_ref.SparseSpec]:
    """DeepSeek-V4-Flash."""
    return [sparse_ref.SparseSpec(device, 64, 512, 128, 4, torch.float16, 64, 1e-6)]


def scratch(spec: sparse_ref.SparseSpec, n_row: int, n_token: int) -> int:
    """Heads in f16, as the next product reads them, and on a GPU parts of rows while it runs."""
    parts = sparse_cuda.scratch_bytes(spec, n_row, n_token) if spec.device.type == "cuda" else 0
    return n_row * 2 * spec.n_head * spec.dim + parts


sparse_attend: Op[sparse_ref.SparseSpec, sparse_ref.SparseAttend] = Op(
    "sparse_attend",
    Impl("torch", sparse_ref.bind),
    [Impl("cuda", sparse_cuda.bind, sparse_cuda.limits, capturable=True, programs=sparse_cuda.programs)],
    check,
    guard=sparse_ref.GUARD,
    shapes=shapes,
    scratch=scratch,
)
