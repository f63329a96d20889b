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
def value(code, table, VALUE: tl.constexpr, OFFSET: tl.constexpr):
    """What a code stands for, before its scale: a whole number, so exact in f16."""
    if VALUE == LOOKED_UP:
        return tl.load(table + code)
    if VALUE == E2M1:
        size = code & 7
        size = tl.where(size < 4, size, tl.where(size < 6, 2 * size - 4, 4 * size - 16))
        return tl.where(code < 8, size, -size).to(tl.float16)
    return (code - OFFSET).to(tl.float16)


@kernel
def product(
    x, codes, high, scales, minima, supers, super_minima, table, part, n_row,
    N_IN: tl.constexpr, N_CHUNK: tl.constexpr, PER: tl.constexpr, BM: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr,
    GROUP: tl.constexpr, OFFSET: tl.constexpr, VALUE: tl.constexpr, SCALE: tl.constexpr, SPAN: tl.constexpr, N_SPAN: tl.constexpr,
    MINIMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, splits, blocks of BM rows): sums over PER chunks of 64 columns, each group's times its scale -> part [split, row, tile * 64]."""
    tile, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.program_id(2) * BM + tl.arange(0, BM)
    out, k = tl.arange(0, 64), tl.arange(0, GROUP)
    acc = tl.zeros((BM, 64), tl.float32)
    for chunk in tl.range(split * PER, tl.minimum(split * PER + PER, N_CHUNK), num_stages=STAGES):
        here = tile * N_CHUNK + chunk
        for g in tl.static_range(64 // GROUP):
            column = chunk * 64 + g * GROUP + k
            a = tl.load(
                x + row[:, None] * N_IN + column[None, :],
                mask=(row[:, None] < n_row) & (column[None, :] < N_IN),
                other=0.0,
            )
            if BITS == 8:
                w = tl.load(codes + here * 4096 + out[:, None] * 64 + (g * GROUP + k)[None, :])
                w = w.to(tl.int8).to(tl.float16)
            else:
                j, upper = g * GROUP % 32 + k, 4 * (g * GROUP // 32)
                code = (tl.load(codes + here * 2048 + out[:, None] * 32 + j[None, :]).to(tl.int32) >> upper) & 15
                if HIGH > 0:
                    more = tl.load(
                        high + here * (512 * HIGH) + out[:, None] * (8 * HIGH) + (j % (8 * HIGH))[None, :]
                    ).to(tl.int32)
                    code = code | ((more >> ((j // (8 * HIGH)) * HIGH + upper)[None, :]) & ((1 << HIGH) - 1)) << 4
                w = value(code, table, VALUE, OFFSET)
            p = tl.dot(a, tl.trans(w))
            at = (here * (64 // GROUP) + g) * 64 + out
            s = number(tl.load(scales + at), SCALE)
            if SPAN > 0:
                span = (tile * N_SPAN + (chunk * (64 // GROUP) + g) // SPAN) * 64 + out
                s = s * tl.load(supers + span).to(tl.float32)
            acc += p * s[None, :]
            if MINIMA:
                low = number(tl.load(minima + at), NUMBER)
                if SPAN > 0:
                    low = low * tl.load(super_minima + span).to(tl.float32)
                acc -= tl.sum(a.to(tl.float32), 1)[:, None] * low[None, :]
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
