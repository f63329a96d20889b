"""`sparse_attend`: a window of raw rows and chosen compressed ones under one softmax."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.sparse_attend import cuda, ref
from pyspec.cuda.ops.sparse_attend.cases import check


def scratch(spec: ref.SparseSpec, n_row: int, n_token: int) -> int:
    """Heads in f16, as the next product reads them, and on a GPU parts of rows while it runs."""
    parts = cuda.scratch_bytes(spec, n_row, n_token) if spec.device.type == "cuda" else 0
    return n_row * 2 * spec.n_head * spec.dim + parts


sparse_attend: Op[ref.SparseSpec, ref.SparseAttend] = declared(
    ref,
    cuda,
    check=check,
    # DeepSeek-V4-Flash
    shapes=lambda device: [ref.SparseSpec(device, 64, 512, 128, 4, torch.float16, 64, 1e-6)],
    scratch=scratch,
)
