"""Bytes that a forward of `deepseek4` takes while it runs, for the memory plan."""

from __future__ import annotations

import torch

from pyspec.cuda.ops.index_rows import op as index_op
from pyspec.cuda.ops.index_rows.ref import IndexSpec
from pyspec.cuda.ops.moe import op as moe_op
from pyspec.cuda.ops.sparse_attend import op as sparse_op
from pyspec.cuda.ops.sparse_attend.ref import SparseSpec
from pyspec.models.deepseek4_config import CSA, Deepseek4Config


def scratch_bytes(c: Deepseek4Config, n_row: int, n_token: int, kv: torch.dtype, device: torch.device) -> int:
    """Of a layer's heads (the product, attended), of the streams, of partial sums of its kernels, and of experts' buffers."""
    a, x = c.heads, c.indexer
    heads, rest = a.n_head * a.head_dim, x.n_head * x.dim
    rows = n_row * (4 * (2 * heads + 2 * rest) + 2 * heads + 4 * 3 * c.n_hidden)
    if device.type != "cuda":
        return rows
    specs = [SparseSpec(device, a.n_head, a.head_dim, c.window, ratio, kv, c.n_rot, c.eps) for ratio in set(c.ratios)]
    index = index_op.scratch_bytes(IndexSpec(device, x.n_head, x.dim, x.top_k, CSA, kv, c.n_rot), n_row, n_token)
    rows += moe_op.buffer_bytes(c.moe.n_used, c.moe.n_expert, c.n_embd, c.moe.n_ff)
    return rows + max(index, *(sparse_op.scratch_bytes(spec, n_row, n_token) for spec in specs))
