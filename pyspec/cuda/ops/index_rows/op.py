"""`index_rows`: the compressed rows that a token attends to."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.index_rows import cpu, cuda, ref
from pyspec.cuda.ops.index_rows.cases import check


def scratch(spec: ref.IndexSpec, n_row: int, n_token: int) -> int:
    """A copy of its queries, and on a GPU scores while it runs."""
    scores = cuda.scratch_bytes(spec, n_row, n_token) if spec.device.type == "cuda" else 0
    return n_row * 4 * spec.n_head * spec.dim + scores


index_rows: Op[ref.IndexSpec, ref.IndexRows] = declared(
    ref,
    cuda,
    cpu,
    check=check,
    # DeepSeek-V4-Flash
    shapes=lambda device: [ref.IndexSpec(device, 64, 128, 512, 4, torch.float16, 64)],
    scratch=scratch,
)
