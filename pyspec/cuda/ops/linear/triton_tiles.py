"""Sums over tiles of packed weights in Triton, for `linear` and for experts. Imported by kernels only: it needs Triton.

Weights are the first operand of the tensor cores, 64 of them as their rows, and rows of a batch are columns: few waste little. Each group's
products are summed in f16 operands times whole codes, then multiplied with the group's scale, so no weight is rounded. A build for more columns adds
in the same order: a row's bits do not depend on the others, nor on how many they are. That takes two warps at most: four of one GPU
would multiply by another instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUMBER, E4M3, E8M0 = (tl.constexpr(i) for i in range(3))  # what a scale is: tile_launch.SCALES
LOOKED_UP, E2M1 = tl.constexpr(1), tl.constexpr(2)  # what a code stands for: tile_launch.value_of


@triton.jit
def number(x, KIND: tl.constexpr):
    """A scale as f32; of e4m3 over 2^7."""
    if KIND == E4M3:
        return (x.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)
    if KIND == E8M0:
        return (x.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 0.5
    if x.dtype == tl.uint8:  # a conversion takes longer
        return (x.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return x.to(tl.float32)


@triton.jit
def value(code, table, VALUE: tl.constexpr, OFFSET: tl.constexpr):
    """What a code [int16] of at most ten bits stands for, before its scale: exact in f16. Floats of four bits over 2^15."""
    if VALUE == LOOKED_UP:
        return tl.load(table + code)
    if VALUE == E2M1:
        return (((code & 7) << 9) | ((code & 8) << 12)).to(tl.float16, bitcast=True)
    return (code | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + OFFSET)


@triton.jit
def of_bytes(w, ASM: tl.constexpr):
    if ASM == "":
        return (w.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    return tl.inline_asm_elementwise(ASM, "=r,=r,r", [w], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def of_nibbles(w, table, VALUE: tl.constexpr, OFFSET: tl.constexpr, ASM: tl.constexpr):
    """(weights of the low nibbles, of the high ones)."""
    if ASM == "":
        code = w.to(tl.int16)
        return value(code & 15, table, VALUE, OFFSET), value(code >> 4, table, VALUE, OFFSET)
    return tl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r", [w], dtype=(tl.float16, tl.float16), is_pure=True, pack=4)


@triton.jit
def of_more(w, high, shift, table, VALUE: tl.constexpr, OFFSET: tl.constexpr, ASM: tl.constexpr):
    """The same of codes with two upper bits, after a shift: the low ones, and from bit 4 on."""
    if ASM == "":
        code, more = w.to(tl.int16), high.to(tl.int16) >> shift.to(tl.int16)
        low, up = (code & 15) | ((more & 3) << 4), (code >> 4) | (more & 0x30)
        return value(low, table, VALUE, OFFSET), value(up, table, VALUE, OFFSET)
    return tl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r,r,r", [w, high, shift], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
    )


@triton.jit
def columns(x, at, is_row, first, G: tl.constexpr, GROUP: tl.constexpr, N_IN: tl.constexpr):
    """[32 columns from `first` on, rows] f16 of x, whose rows begin at `at`; zeros where they are of another group than G."""
    k = tl.arange(0, 32)
    column = first + k
    mask = is_row[None, :]
    if N_IN % 64 != 0:
        mask = mask & (column[:, None] < N_IN)
    if GROUP == 16:
        mask = mask & (k[:, None] // 16 == G % 2)
    return tl.load(x + at[None, :] + column[:, None], mask=mask, other=0.0)


@triton.jit
def grouped(acc, products, a, scales, minima, by, less, SCALE: tl.constexpr, SPAN: tl.constexpr, MINIMA: tl.constexpr):
    """acc + products * scale - (sums of the columns a) * minimum, of a group. scales, minima: pointers; by, less: what those are times."""
    scale = number(tl.load(scales), SCALE)
    if SPAN > 0:
        scale = scale * by
    acc += products * scale[:, None]
    if MINIMA:
        minimum = number(tl.load(minima), NUMBER)
        if SPAN > 0:
            minimum = minimum * less
        ones = tl.full((64, a.shape[0]), 1.0, tl.float16)
        acc -= tl.dot(ones, a) * minimum[:, None]
    return acc


@triton.jit
def chunk_sums(
    acc, x, at, is_row, codes, high, scales, minima, supers, super_minima, table, tile, chunk,
    N_IN: tl.constexpr, N_CHUNK: tl.constexpr, N_SPAN: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr,
    OFFSET: tl.constexpr, VALUE: tl.constexpr, SCALE: tl.constexpr, SPAN: tl.constexpr, MINIMA: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc [64 weights' rows, rows] f32 and what 64 columns of a tile add."""
    out, k = tl.arange(0, 64), tl.arange(0, 32)
    groups: tl.constexpr = 64 // GROUP
    here = tile * N_CHUNK + chunk
    scales, minima = scales + here * (groups * 64) + out, minima + here * (groups * 64) + out
    by, less = 1.0, 1.0
    if SPAN > 0:
        span = (tile * N_SPAN + chunk * groups // SPAN) * 64 + out
        by = tl.load(supers + span).to(tl.float32)
        if MINIMA:
            less = tl.load(super_minima + span).to(tl.float32)
    if BITS == 8:
        w = codes + here * 4096 + out[:, None] * 64 + k[None, :]
        first, second = of_bytes(tl.load(w), ASM), of_bytes(tl.load(w + 32), ASM)
    elif HIGH == 0:
        w = tl.load(codes + here * 2048 + out[:, None] * 32 + k[None, :])
        first, second = of_nibbles(w, table, VALUE, OFFSET, ASM)
    else:
        w = tl.load(codes + here * 2048 + out[:, None] * 32 + k[None, :])
        more = tl.load(high + here * 1024 + out[:, None] * 16 + (k % 16)[None, :])
        shift = (k // 16 * 2).to(tl.uint8)[None, :] + tl.zeros((64, 32), tl.uint8)
        first, second = of_more(w, more, shift, table, VALUE, OFFSET, ASM)
    for g in tl.static_range(groups):
        a = columns(x, at, is_row, chunk * 64 + g * GROUP // 32 * 32, g, GROUP, N_IN)
        if g * GROUP < 32:
            products = tl.dot(first, a)
        else:
            products = tl.dot(second, a)
        acc = grouped(acc, products, a, scales + g * 64, minima + g * 64, by, less, SCALE, SPAN, MINIMA)
    return acc
