"""The kernels of `linear` in Triton. Imported where they are launched only."""

from __future__ import annotations

import triton
import triton.language as tl

from pyspec.cuda.ops.recurrent.triton_kernels import sigmoid
from pyspec.cuda.tri_guards import kernel

NUMBER, E4M3, E8M0 = (tl.constexpr(i) for i in range(3))  # what a scale is: triton.SCALES
LOOKED_UP, E2M1 = tl.constexpr(1), tl.constexpr(2)  # what a code stands for: triton.VALUES
RESIDUAL, GATED = tl.constexpr(1), tl.constexpr(2)  # ref.Epilogue


@triton.jit
def number(x, KIND: tl.constexpr):
    """A scale as f32."""
    if KIND == E4M3:
        return (x.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 128.0
    if KIND == E8M0:
        return (x.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 0.5
    return x.to(tl.float32)


@triton.jit
def whole(bits, OFFSET: tl.constexpr):
    """Codes of up to ten bits, as int16, less OFFSET: exact in f16, and two instructions for two of them."""
    return (bits | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + OFFSET)


@triton.jit
def value(code, table, VALUE: tl.constexpr, OFFSET: tl.constexpr):
    """What a code [int16] stands for, before its scale: a whole number, so exact in f16."""
    if VALUE == LOOKED_UP:
        return tl.load(table + code)
    if VALUE == E2M1:  # its bits where f16 has them
        return (((code & 7) << 9) | ((code & 8) << 12)).to(tl.float16, bitcast=True) * 32768.0
    return whole(code, OFFSET)


@triton.jit
def upper_bits(high, here, out, k, HALF: tl.constexpr, HIGH: tl.constexpr):
    """What codes of the lower or upper 32 columns of a chunk have above four bits, where it belongs. int16"""
    n_byte = 8 * HIGH
    more = tl.load(high + here * (64 * n_byte) + out[:, None] * n_byte + (k % n_byte)[None, :]).to(tl.int16)
    return ((more >> ((k // n_byte) * HIGH + 4 * HALF).to(tl.int16)[None, :]) & ((1 << HIGH) - 1)) << 4


@kernel
def product(
    x, codes, high, scales, minima, supers, super_minima, table, part, n_row,
    N_IN: tl.constexpr, N_CHUNK: tl.constexpr, PER: tl.constexpr, BM: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr,
    GROUP: tl.constexpr, OFFSET: tl.constexpr, VALUE: tl.constexpr, SCALE: tl.constexpr, SPAN: tl.constexpr, N_SPAN: tl.constexpr,
    MINIMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, splits, blocks of BM rows): sums over PER chunks of 64 columns -> part [split, row, tile * 64]."""
    tile, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.program_id(2) * BM + tl.arange(0, BM)
    out, k = tl.arange(0, 64), tl.arange(0, GROUP)
    acc = tl.zeros((BM, 64), tl.float32)
    groups: tl.constexpr = 64 // GROUP
    for chunk in tl.range(split * PER, tl.minimum(split * PER + PER, N_CHUNK), num_stages=STAGES):
        here = tile * N_CHUNK + chunk
        at = here * groups
        for g in tl.static_range(64 // GROUP):
            column = chunk * 64 + g * GROUP + k
            a = tl.load(
                x + row[:, None] * N_IN + column[None, :],
                mask=(row[:, None] < n_row) & (column[None, :] < N_IN),
                other=0.0,
            )
            if BITS == 8:
                w = tl.load(codes + here * 4096 + out[:, None] * 64 + (g * GROUP + k)[None, :]).to(tl.int16)
                w = whole(w ^ 128, 128)
            else:
                at_byte = g * GROUP % 32 + k
                code = tl.load(codes + here * 2048 + out[:, None] * 32 + at_byte[None, :]).to(tl.int16)
                code = (code >> (g * GROUP // 32 * 4)) & 15
                if HIGH > 0:
                    code = code | upper_bits(high, here, out, at_byte, g * GROUP // 32, HIGH)
                w = value(code, table, VALUE, OFFSET)
            by = number(tl.load(scales + (at + g) * 64 + out), SCALE)
            if SPAN > 0:
                span = (tile * N_SPAN + chunk * groups // SPAN) * 64 + out
                by = by * tl.load(supers + span).to(tl.float32)
            acc += tl.dot(a, tl.trans(w)) * by[None, :]
            if MINIMA:
                less = number(tl.load(minima + (at + g) * 64 + out), NUMBER)
                if SPAN > 0:
                    less = less * tl.load(super_minima + span).to(tl.float32)
                acc -= tl.sum(a.to(tl.float32), 1)[:, None] * less[None, :]
    n_wide = tl.num_programs(0) * 64
    to = (split * n_row + row[:, None]).to(tl.int64) * n_wide + tile * 64 + out[None, :]
    tl.store(part + to, acc, mask=row[:, None] < n_row)


@kernel
def finish(
    part, powers, row_scales, residual, out, n_row, n_wide,
    N_OUT: tl.constexpr, SPLITS: tl.constexpr, EPILOGUE: tl.constexpr, POWERS: tl.constexpr, SCALED: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Grid (rows, stretches of 512 outputs): the splits' sums in their order, times the row's power and the weights' row scale."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * 512 + tl.arange(0, 512)
    is_out = at < N_OUT
    y = tl.zeros((512,), tl.float32)
    up = tl.zeros((512,), tl.float32)
    for split in tl.static_range(SPLITS):
        here = part + (split * n_row + row) * n_wide + at
        y += tl.load(here, mask=is_out, other=0.0)
        if EPILOGUE == GATED:
            up += tl.load(here + N_OUT, mask=is_out, other=0.0)
    if SCALED:
        y = y * tl.load(row_scales + at, mask=is_out, other=0.0)
        if EPILOGUE == GATED:
            up = up * tl.load(row_scales + N_OUT + at, mask=is_out, other=0.0)
    if POWERS:
        power = tl.load(powers + row)
        y = y * power
        up = up * power
    if EPILOGUE == GATED:
        if LIMIT > 0.0:
            y = tl.minimum(y, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        y = y * sigmoid(y) * up
    if EPILOGUE == RESIDUAL:
        y = y + tl.load(residual + row * N_OUT + at, mask=is_out, other=0.0)
    tl.store(out + row * N_OUT + at, y, mask=is_out)
