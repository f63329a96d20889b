"""The kernels of `linear` in Triton. Imported where they are launched only."""

from __future__ import annotations

import triton
import triton.language as tl

from pyspec.cuda.ops.linear.triton_tiles import chunk_sums
from pyspec.cuda.ops.recurrent.triton_kernels import sigmoid
from pyspec.cuda.tri_guards import kernel

RESIDUAL, GATED = tl.constexpr(1), tl.constexpr(2)  # ref.Epilogue


@triton.jit
def summed(part, split_step, at, is_out, SPLITS: tl.constexpr):
    """The splits' sums in their order."""
    y = tl.load(part + at, mask=is_out, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        y += tl.load(part + split * split_step + at, mask=is_out, other=0.0, cache_modifier=".cg")
    return y


@triton.jit
def ended(
    part, powers, row_scales, residual, out, row, column, n_row, n_wide,
    N_OUT: tl.constexpr, SPLITS: tl.constexpr, EPILOGUE: tl.constexpr, POWERS: tl.constexpr, SCALED: tl.constexpr, GATE_LIMIT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Finish rows [n] and columns [m]: the splits' sums, times the row's power and the weights' row scale."""
    is_out = (row[:, None] < n_row) & (column[None, :] < N_OUT)
    at = row[:, None].to(tl.int64) * n_wide + column[None, :]
    split_step = n_row.to(tl.int64) * n_wide
    y = summed(part, split_step, at, is_out, SPLITS)
    if EPILOGUE == GATED:
        up = summed(part + N_OUT, split_step, at, is_out, SPLITS)
    if SCALED:
        y = y * tl.load(row_scales + column, mask=column < N_OUT, other=0.0)[None, :]
        if EPILOGUE == GATED:
            up = up * tl.load(row_scales + N_OUT + column, mask=column < N_OUT, other=0.0)[None, :]
    if POWERS:
        power = tl.load(powers + row, mask=row < n_row, other=0.0)[:, None]
        y = y * power
        if EPILOGUE == GATED:
            up = up * power
    if EPILOGUE == GATED:
        if LIMIT > 0.0:
            y = tl.where(y > GATE_LIMIT, GATE_LIMIT, y)  # what is no number stays none
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        y = y * sigmoid(y) * up
    to = row[:, None].to(tl.int64) * N_OUT + column[None, :]
    if EPILOGUE == RESIDUAL:
        y = y + tl.load(residual + to, mask=is_out, other=0.0)
    tl.store(out + to, y, mask=is_out)


@kernel
def product(
    x, codes, high, scales, supers, table, part, tickets, powers, row_scales, residual, y, n_row,
    N_IN: tl.constexpr, N_CHUNK: tl.constexpr, N_SPAN: tl.constexpr, BITS: tl.constexpr, SPLIT: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, LESS: tl.constexpr, SPAN: tl.constexpr,
    MINIMA: tl.constexpr, ASM: tl.constexpr, AT_ONCE: tl.constexpr,
    UNIT: tl.constexpr, STEP: tl.constexpr, PER: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, FUSED: tl.constexpr,
    N_OUT: tl.constexpr, SPLITS: tl.constexpr, EPILOGUE: tl.constexpr, POWERS: tl.constexpr, SCALED: tl.constexpr, GATE_LIMIT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, splits, blocks of BN rows): sums over PER steps of STEP chunks of 64 columns -> part [split, row, tile * 64].

    FUSED: the last program of a tile, or of a tile of gates and that of its ups, finishes it (`ended`); tickets are 0 before and after.
    """
    tile, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.program_id(2) * BN + tl.arange(0, BN)
    is_row, out = row < n_row, tl.arange(0, 64)
    acc = tl.zeros((64, BN), tl.float32)
    for step in tl.range(split * PER, tl.minimum(split * PER + PER, N_CHUNK // STEP), num_stages=STAGES):
        for half in tl.static_range(STEP):
            acc = chunk_sums(
                acc, x, row.to(tl.int64) * N_IN, is_row, codes, high, scales, supers, table, tile, step * STEP + half,
                N_IN, N_CHUNK, N_SPAN, BITS, SPLIT, HIGH, GROUP, BIAS, VALUE, WIDTH, SCALE, LESS, SPAN, MINIMA, ASM, AT_ONCE, half,
            )  # fmt: skip
    n_tile = tl.num_programs(0)
    n_wide = n_tile * 64
    to = (split * n_row + row[None, :]).to(tl.int64) * n_wide + tile * 64 + out[:, None]
    tl.store(part + to, acc * UNIT, mask=is_row[None, :])
    if FUSED:
        n_unit = n_tile // 2 if EPILOGUE == GATED else n_tile
        unit = tl.program_id(0) % n_unit
        tl.debug_barrier()
        ticket = tickets + tl.program_id(2) * n_unit + unit
        before = tl.atomic_add(ticket, 1, sem="acq_rel")
        if before == SPLITS * (2 if EPILOGUE == GATED else 1) - 1:
            tl.store(ticket, 0)
            ended(
                part, powers, row_scales, residual, y, row, unit * 64 + out, n_row, n_wide,
                N_OUT, SPLITS, EPILOGUE, POWERS, SCALED, GATE_LIMIT, LIMIT,
            )  # fmt: skip


@kernel
def finish(
    part, powers, row_scales, residual, out, n_row, n_wide,
    N_OUT: tl.constexpr, SPLITS: tl.constexpr, EPILOGUE: tl.constexpr, POWERS: tl.constexpr, SCALED: tl.constexpr, GATE_LIMIT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Grid (rows, stretches of 512 outputs): `ended` in a launch of its own."""
    row, column = tl.program_id(0) + tl.arange(0, 1), tl.program_id(1) * 512 + tl.arange(0, 512)
    ended(
        part,
        powers,
        row_scales,
        residual,
        out,
        row,
        column,
        n_row,
        n_wide,
        N_OUT,
        SPLITS,
        EPILOGUE,
        POWERS,
        SCALED,
        GATE_LIMIT,
        LIMIT,
    )
