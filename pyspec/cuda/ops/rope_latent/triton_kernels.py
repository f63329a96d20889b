"""The kernel of `rope_latent` in Triton. Imported where it is launched only."""

from __future__ import annotations

import triton.language as tl

from pyspec.cuda.ops.rope_kv.triton_kernels import put
from pyspec.cuda.tri_guards import kernel, report


@kernel
def rope_latent(
    kv, y, plain, norm, cos, sin, rows, q, k, k_scale, fault,
    kv_stride, y_stride, n_slot, eps,
    RANK: tl.constexpr, N_ROT: tl.constexpr, PLAIN: tl.constexpr, BLOCKS: tl.constexpr, NEOX: tl.constexpr, K_KIND: tl.constexpr,
    OP: tl.constexpr,
):  # fmt: skip
    """Grid (rows, 1 + heads): the row's key, normed, turned and stored, or a query, turned. BLOCKS of 32 dims, and more."""
    row, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n_head = tl.num_programs(1) - 1
    DIM: tl.constexpr = RANK + N_ROT
    HALF: tl.constexpr = N_ROT // 2
    block = tl.arange(0, BLOCKS)
    d = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    e = d - RANK  # of the tail
    is_latent, turns = d < RANK, (d >= RANK) & (d < DIM)
    at = row * n_head + unit - 1
    if unit == 0:
        latent, tail = kv + row * kv_stride, kv + row * kv_stride + RANK
    else:
        latent, tail = plain + at * RANK, y + row * y_stride + (unit - 1) * (PLAIN + N_ROT) + PLAIN
    x = tl.load(latent + d, mask=is_latent, other=0.0)
    if unit == 0:
        inverse = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / RANK + eps)
        x = x * inverse * tl.load(norm + d, mask=is_latent, other=0.0)
    if NEOX:
        other, angle, is_first = tl.where(e < HALF, e + HALF, e - HALF), e % HALF, e < HALF
    else:
        other, angle, is_first = e ^ 1, e // 2, e % 2 == 0
    own, pair = tl.load(tail + e, mask=turns, other=0.0), tl.load(tail + other, mask=turns, other=0.0)
    c = tl.load(cos + row * HALF + angle, mask=turns, other=1.0)
    s = tl.load(sin + row * HALF + angle, mask=turns, other=0.0)
    x = tl.where(turns, tl.where(is_first, own * c - pair * s, own * c + pair * s), x)
    if unit > 0:
        tl.store(q + at * DIM + d, x, mask=d < DIM)
    else:
        to = tl.load(rows + row)
        if (to < 0) | (to >= n_slot):  # nothing is written: another row's keys would be spoilt
            index = tl.where((to < 0) | (to > 0x7FFFFFFF), -1, to).to(tl.int32)
            report(fault, OP, row.to(tl.int32), index, n_slot)
        else:
            put(x, k, k_scale, to, d, block, DIM, K_KIND)
