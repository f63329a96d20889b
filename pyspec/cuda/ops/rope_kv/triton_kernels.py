"""The kernel of `rope_kv` in Triton. Imported where it is launched only. Rounding is that of slots/kv.py, bit by bit."""

from __future__ import annotations

import triton
import triton.language as tl

from pyspec.cuda.tri_guards import kernel, report

Q8_0, F8 = tl.constexpr(3), tl.constexpr(4)  # KIND of cuda.py's KINDS: the others are plain numbers
MAX_SCALE, MAX_F8 = tl.constexpr(515.5), tl.constexpr(448.0)
ROUND = tl.constexpr(12582912.0)  # adding it rounds a number to the nearest integer, ties to even


@triton.jit
def e4m3_of(x):
    """To nearest even, saturating; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    sign, size = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    y = tl.minimum(size.to(tl.float32, bitcast=True), MAX_F8)
    z = y.to(tl.int32, bitcast=True)
    small = ((y * 512.0 + ROUND) - ROUND).to(tl.int32)  # multiples of 2^-9; 8 is the next power's
    code = tl.where(y < 0.015625, small, ((z + 0x7FFFF + ((z >> 20) & 1)) >> 20) - (120 << 3))
    return (sign | tl.where(size > 0x7F800000, 0x7F, code)).to(tl.uint8)


@triton.jit
def put(x, codes, scales, at, d, block, DIM: tl.constexpr, KIND: tl.constexpr):
    """x [block, 32] f32 to the pool's head `at`."""
    to = codes + at * DIM + d
    if KIND == Q8_0:
        is_none = tl.max((x != x).to(tl.int32), 1) != 0
        scale = tl.minimum(tl.max(tl.abs(x), 1) * (1.0 / 127.0), MAX_SCALE).to(tl.float16)
        wide = scale.to(tl.float32)
        inverse = tl.div_rn(tl.zeros_like(wide) + 1.0, tl.where(wide > 0.0, wide, 1.0))
        code = tl.minimum(tl.maximum(x * inverse[:, None], -127.0), 127.0)
        code = tl.where((wide > 0.0)[:, None] & (is_none == 0)[:, None], (code + ROUND) - ROUND, 0.0)
        tl.store(to, code.to(tl.int8), mask=d < DIM)
        scale = tl.where(is_none, float("nan"), wide).to(tl.float16)
        tl.store(scales + at * (DIM // 32) + block, scale, mask=block < DIM // 32)
    elif KIND == F8:
        tl.store(to, e4m3_of(x), mask=d < DIM)
    else:
        tl.store(to, x.to(codes.dtype.element_ty), mask=d < DIM)


@triton.jit
def normed(y, d, weight, eps, DIM: tl.constexpr, HAS_NORM: tl.constexpr, inverse):
    x = tl.load(y + d, mask=d < DIM, other=0.0)
    if HAS_NORM:
        x = x * inverse * tl.load(weight + d, mask=d < DIM, other=0.0)
    return x


@kernel
def rope_kv(
    y, q_norm, k_norm, cos, sin, rows, q, k, v, k_scale, v_scale, fault,
    y_stride, n_slot, eps,
    N_Q: tl.constexpr, N_KV: tl.constexpr, DIM: tl.constexpr, BLOCKS: tl.constexpr, N_ROT: tl.constexpr, NEOX: tl.constexpr,
    STEP: tl.constexpr, HAS_NORM: tl.constexpr, NORM_BEHIND: tl.constexpr, NORMS_V: tl.constexpr, KEYS_ARE_VALUES: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """Grid (rows, heads of q, k and v). n_slot: rows of the pool; STEP: distance of q's heads; BLOCKS of 32 dims, and more."""
    row, unit = tl.program_id(0), tl.program_id(1)
    block = tl.arange(0, BLOCKS)
    d = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_q, is_v = unit < N_Q, unit >= N_Q + N_KV
    first = tl.where(is_q, unit * STEP, N_Q * STEP + (unit - N_Q) * DIM)
    if KEYS_ARE_VALUES:
        first = tl.where(is_v, first - N_KV * DIM, first)
    from_row = y + row.to(tl.int64) * y_stride + first
    if is_v:
        x = tl.load(from_row + d, mask=d < DIM, other=0.0)
        if NORMS_V:
            x = x * tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / DIM + eps)
    else:
        BEFORE: tl.constexpr = HAS_NORM and not NORM_BEHIND
        weight = q_norm if is_q else k_norm
        inverse = 1.0
        if BEFORE:
            raw = tl.load(from_row + d, mask=d < DIM, other=0.0)
            inverse = tl.rsqrt(tl.sum(tl.sum(raw * raw, 1), 0) / DIM + eps)
        x = normed(from_row, d, weight, eps, DIM, BEFORE, inverse)
        if N_ROT > 0:
            HALF: tl.constexpr = N_ROT // 2
            turns = d < N_ROT
            if NEOX:
                other, angle, is_first = tl.where(d < HALF, d + HALF, d - HALF), d % HALF, d < HALF
            else:
                other, angle, is_first = d ^ 1, d // 2, d % 2 == 0
            pair = normed(from_row, tl.where(turns, other, DIM), weight, eps, DIM, BEFORE, inverse)
            at = row.to(tl.int64) * HALF + angle
            c, s = tl.load(cos + at, mask=turns, other=1.0), tl.load(sin + at, mask=turns, other=0.0)
            x = tl.where(turns, tl.where(is_first, x * c - pair * s, x * c + pair * s), x)
        if NORM_BEHIND:
            x = x * tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / DIM + eps)
            if HAS_NORM:
                x = x * tl.load(weight + d, mask=d < DIM, other=0.0)
    if is_q:
        tl.store(q + (row.to(tl.int64) * N_Q + unit) * DIM + d, x, mask=d < DIM)
    else:
        to = tl.load(rows + row)
        if (to < 0) | (to >= n_slot):  # nothing is written: another row's keys would be spoilt
            report(fault, OP, row, tl.where((to < 0) | (to > 0x7FFFFFFF), -1, to).to(tl.int32), n_slot)
        elif is_v:
            put(x, v, v_scale, to * N_KV + unit - N_Q - N_KV, d, block, DIM, V_KIND)
        else:
            put(x, k, k_scale, to * N_KV + unit - N_Q, d, block, DIM, K_KIND)
