"""The kernel of `heads` in Triton. Imported where it is launched only."""

from __future__ import annotations

import triton.language as tl

from pyspec.cuda.tri_guards import kernel


@kernel
def heads(
    x, weight, out, row_step, head_step, n_row, n_head,
    N_IN: tl.constexpr, N_OUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid (BN outputs, heads, BM rows): a head of rows times its matrix, columns in order, in f32 throughout."""
    h = tl.program_id(1).to(tl.int64)
    row, o = tl.program_id(2) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    is_row, is_out = row < n_row, o < N_OUT
    from_row = x + row.to(tl.int64)[:, None] * row_step + h * head_step
    from_out = weight + (h * N_OUT + o)[None, :] * N_IN
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, N_IN, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(from_row + k[None, :], mask=is_row[:, None] & (k < N_IN)[None, :], other=0.0)
        w = tl.load(from_out + k[:, None], mask=is_out[None, :] & (k < N_IN)[:, None], other=0.0)
        acc = tl.dot(a, w.to(tl.float32), acc, input_precision="ieee")
    to = out + (row.to(tl.int64) * n_head + h)[:, None] * N_OUT + o[None, :]
    tl.store(to, acc, mask=is_row[:, None] & is_out[None, :])
