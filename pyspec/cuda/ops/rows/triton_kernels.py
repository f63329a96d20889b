"""The kernel of `rows` in Triton. Imported where it is launched only."""

from __future__ import annotations

import triton
import triton.language as tl

from pyspec.cuda.ops.recurrent.triton_kernels import sigmoid
from pyspec.cuda.tri_guards import kernel

NORM, HEADS, GATE, GLU, GROUPS, RELU2, GEGLU = (tl.constexpr(i) for i in range(1, 8))  # ref.PrepKind


@triton.jit
def power_of(x):
    """The power of two that brings the largest of x into [1, 2); 1 for zeros and subnormal numbers."""
    largest = tl.max(tl.abs(x), 0)
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))


@kernel
def rows(
    x, weight, gate, out, powers, x_stride, gate_stride, head_stride, eps, power,
    N_IN: tl.constexpr, PART: tl.constexpr, WIDE: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr, OWN_POWER: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Grid (rows, parts of PART columns). HALF: out is f16, of values over a power of two, the row's own or the one that is given."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDE)
    column, is_column = part * PART + at, at < PART
    y = tl.load(x + row * x_stride + column, mask=is_column, other=0.0)
    if KIND == GLU:
        y = y * sigmoid(y) * tl.load(x + row * x_stride + N_IN + column, mask=is_column, other=0.0)
    elif KIND == GEGLU:
        by = tl.load(x + row * x_stride + N_IN + column, mask=is_column, other=0.0)
        y = y * sigmoid(1.5957691216 * y * (1.0 + 0.044715 * y * y)) * by
    elif KIND == RELU2:
        y = tl.maximum(y, 0.0)
        y = y * y
    elif KIND == GATE:
        by = tl.load(
            gate + row * gate_stride + column // DIM * head_stride + column % DIM,
            mask=is_column,
            other=0.0,
        )
        y = y * sigmoid(by)
    elif KIND == NORM:
        w = tl.load(weight + column, mask=is_column, other=0.0)
        y = y * tl.rsqrt(tl.sum(y * y, 0) / PART + eps) * w
    elif KIND == HEADS:
        by = tl.load(gate + row * gate_stride + column, mask=is_column, other=0.0)
        w = tl.load(weight + at, mask=is_column, other=0.0)
        y = y * tl.rsqrt(tl.sum(y * y, 0) / PART + eps) * w * (by * sigmoid(by))
    elif KIND == GROUPS:
        by = tl.load(gate + row * gate_stride + column, mask=is_column, other=0.0)
        w = tl.load(weight + column, mask=is_column, other=0.0)
        y = y * (by * sigmoid(by))
        y = y * tl.rsqrt(tl.sum(y * y, 0) / PART + eps) * w
    if HALF:
        if OWN_POWER:
            power = power_of(y)
        y = y / power
        if part == 0:
            tl.store(powers + row, power)
    tl.store(out + row * N_IN + column, y.to(out.dtype.element_ty), mask=is_column)
