"""Sums over tiles of packed weights in Triton, for `linear` and for experts. Only kernels import it, because it needs Triton.

Weights are the first operand of the tensor cores, 64 of them as their rows, and rows of a batch are columns: few waste little. Each group's
products are summed in f16 operands times whole codes, then multiplied with the group's scale, so no weight is rounded. Codes have an offset from
their values; the offset times the sum of a row's columns is the start of a group's sum. A build for more columns adds
in the same order: a row's bits do not depend on the others, nor on how many they are. That takes two warps at most: four of one GPU
would multiply by another instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUMBER, E4M3, E8M0 = (tl.constexpr(i) for i in range(3))  # types of a scale: tile_launch.SCALES
MORE_ASM = tl.constexpr("prmt.b32 $0, $3, 0, 0x4140; mov.b32 $1, $0;")
LESS_ASM = tl.constexpr("prmt.b32 $0, $3, 0, 0x4140; or.b32 $0, $0, 0x80008000; mov.b32 $1, $0;")
LOOKED_UP, E2M1 = tl.constexpr(1), tl.constexpr(2)  # kinds of a code's value: tile_launch.value_of


@triton.jit
def number(packed, NTH: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, LESS: tl.constexpr):
    """Field NTH of a row's scales as f32; of e4m3 over 2^7."""
    if WIDTH == 16:
        found = (packed >> (16 * NTH)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:  # not behind a return: Triton compiles the code after one, too, and rejects it
        code = (packed.to(tl.int32) >> (WIDTH * NTH)) & ((1 << WIDTH) - 1)
        if KIND == E4M3:
            found = (code << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        elif KIND == E8M0:
            found = (code << 23).to(tl.float32, bitcast=True) * 0.5
        else:
            # A conversion takes longer
            found = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LESS)
    return found


@triton.jit
def value(code, table, VALUE: tl.constexpr):
    """A code [int16] as an operand: see tile_codes.py."""
    if VALUE == LOOKED_UP:
        return tl.load(table + code)
    if VALUE == E2M1:
        return (((code & 7) << 9) | ((code & 8) << 12)).to(tl.float16, bitcast=True)
    return code.to(tl.float16, bitcast=True)


@triton.jit
def of_bytes(w, ASM: tl.constexpr):
    if ASM == "":
        return w.to(tl.int16).to(tl.float16, bitcast=True)
    return tl.inline_asm_elementwise(ASM, "=r,=r,r", [w], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def of_nibbles(w, table, VALUE: tl.constexpr, ASM: tl.constexpr):
    """(weights of the low nibbles, of the high ones)."""
    if ASM == "":
        code = w.to(tl.int16)
        return value(code & 15, table, VALUE), value(code >> 4, table, VALUE)
    return tl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r", [w], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
    )


@triton.jit
def upper(code, more, NTH: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr):
    """A quarter's codes with their upper bits."""
    if HIGH == 2:
        return code | (((more >> (2 * NTH)) & 3) << BITS)
    if HIGH == 1:
        return code | (((more >> (2 * HALF + NTH % 2 + NTH // 2 * 4)) & 1) << BITS)
    return code


@triton.jit
def four(ASM: tl.constexpr, HOW: tl.constexpr, given):
    return tl.inline_asm_elementwise(
        ASM, HOW, given, dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=4
    )


@triton.jit
def quarters(
    codes, high, here, pair, table, HALF: tl.constexpr, BITS: tl.constexpr, SPLIT: tl.constexpr, HIGH: tl.constexpr, VALUE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """(bytes of their shape, the weights of four times sixteen columns). HALF: of a pair of chunks."""
    out, k = tl.arange(0, 64), tl.arange(0, 16)
    if BITS == 4:
        w = codes + here * 2048 + out[:, None] * (32 // SPLIT) + k[None, :]
        first, second = tl.load(w), tl.load(w + (1024 if SPLIT == 2 else 16))
        if HIGH == 0:
            q0, q2 = of_nibbles(first, table, VALUE, ASM)
            q1, q3 = of_nibbles(second, table, VALUE, ASM)
            return first, (q0, q1, q2, q3)
    else:
        first = tl.load(codes + here * 1024 + out[:, None] * 16 + k[None, :])
        second = first
    more = first
    if HIGH == 2:
        more = tl.load(high + here * 1024 + out[:, None] * 16 + k[None, :])
    if HIGH == 1:
        more = tl.load(high + pair * 1024 + out[:, None] * 16 + k[None, :])
    if ASM == "":
        low, other, more = first.to(tl.int16), second.to(tl.int16), more.to(tl.int16)
        if BITS == 4:
            c0, c1, c2, c3 = low & 15, other & 15, low >> 4, other >> 4
        else:
            c0, c1, c2, c3 = low & 3, (low >> 2) & 3, (low >> 4) & 3, low >> 6
        return first, (
            value(upper(c0, more, 0, HALF, BITS, HIGH), table, VALUE),
            value(upper(c1, more, 1, HALF, BITS, HIGH), table, VALUE),
            value(upper(c2, more, 2, HALF, BITS, HIGH), table, VALUE),
            value(upper(c3, more, 3, HALF, BITS, HIGH), table, VALUE),
        )
    if BITS == 2 and HIGH == 0:
        return first, four(ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r", [first])
    if HIGH == 2:
        return first, four(ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [first, second, more])
    if BITS == 2:
        return first, four(
            ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [first, more, tl.full((64, 16), 2 * HALF, tl.uint8)]
        )
    return first, four(
        ASM,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
        [first, second, more, tl.full((64, 16), 2 * HALF, tl.uint8)],
    )


@triton.jit
def columns(x, at, is_row, first, K: tl.constexpr, N_IN: tl.constexpr, AT_ONCE: tl.constexpr):
    """[K columns from `first` on, rows] f16 of x, whose rows begin at `at`. AT_ONCE: columns of a thread's load; eight of them, 16 bytes, would
    be copied around L1, where programs of other weights find the same columns."""
    column = tl.max_contiguous(tl.multiple_of(first + tl.arange(0, K), AT_ONCE), AT_ONCE)
    mask = is_row[None, :]
    if N_IN % 128 != 0:  # the last chunk may be half of a pair, or less
        mask = mask & (column[:, None] < N_IN)
    return tl.load(x + at[None, :] + column[:, None], mask=mask, other=0.0)


@triton.jit
def everywhere(w, CODE: tl.constexpr, SIGN: tl.constexpr, ASM: tl.constexpr):
    """f16 in the shape of bytes w, all SIGN * CODE over 2^24: made of w, as weights are, or Triton would lay a product with them out in another
    way, and columns that are multiplied with both would not be fetched ahead."""
    if ASM == "":
        return tl.full(w.shape, SIGN * CODE * 2.0**-24, tl.float16)
    text: tl.constexpr = MORE_ASM if SIGN > 0 else LESS_ASM
    return tl.inline_asm_elementwise(
        text, "=r,=r,r,r", [w, tl.full(w.shape, CODE, tl.uint8)], dtype=tl.float16, is_pure=True, pack=4
    )


@triton.jit
def products(q, w, a, before, BIAS: tl.constexpr, ASM: tl.constexpr):
    """before + (codes q - BIAS) times the columns a, over 2^24. w: bytes of q's shape."""
    if BIAS > 0:
        before = tl.dot(everywhere(w, BIAS, -1, ASM), a, before)
    return tl.dot(q, a, before)


@triton.jit
def grouped(
    acc, sums, ones, packed, NTH: tl.constexpr, by, less,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, LESS: tl.constexpr, SPAN: tl.constexpr, MINIMA: tl.constexpr,
):  # fmt: skip
    """acc + sums * scale - ones * minimum, of group NTH. ones: sums of its columns, over 2^24; by, less: factors of scale and minimum."""
    scale = number(packed, NTH, WIDTH, SCALE, LESS)
    if SPAN > 0:
        scale = scale * by
    acc += sums * scale[:, None]
    if MINIMA:
        minimum = number(packed, 64 // GROUP + NTH, WIDTH, NUMBER, 0)
        if SPAN > 0:
            minimum = minimum * less
        acc -= ones * minimum[:, None]
    return acc


@triton.jit
def chunk_sums(
    acc, x, at, is_row, codes, high, scales, supers, table, tile, chunk,
    N_IN: tl.constexpr, N_CHUNK: tl.constexpr, N_SPAN: tl.constexpr, BITS: tl.constexpr, SPLIT: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, LESS: tl.constexpr, SPAN: tl.constexpr,
    MINIMA: tl.constexpr, ASM: tl.constexpr, AT_ONCE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """acc [64 weights' rows, rows] f32 plus the products of 64 columns of a tile, over tile_codes.unit. HALF: chunk % 2, where upper bits of two chunks lie together."""
    out, k, none = tl.arange(0, 64), tl.arange(0, 32), tl.zeros(acc.shape, tl.float32)
    here = tile * N_CHUNK + chunk
    packed = tl.load(scales + here * 64 + out)
    by, less = 1.0, 1.0
    if SPAN > 0:
        both = tl.load(supers + (tile * N_SPAN + chunk * 64 // (GROUP * SPAN)) * 64 + out)
        by = number(both, 0, 16, NUMBER, 0)
        if MINIMA:
            less = number(both, 1, 16, NUMBER, 0)
    if GROUP == 32 and HIGH == 0 and BITS > 2:
        if BITS == 8:
            at_w = codes + here * 4096 + out[:, None] * (64 // SPLIT) + k[None, :]
            w = tl.load(at_w)
            whole = of_bytes(w, ASM), of_bytes(tl.load(at_w + (2048 if SPLIT == 2 else 32)), ASM)
        else:
            w = tl.load(codes + here * 2048 + out[:, None] * 32 + k[None, :])
            whole = of_nibbles(w, table, VALUE, ASM)
        for g in tl.static_range(2):
            a, ones = columns(x, at, is_row, chunk * 64 + g * 32, 32, N_IN, AT_ONCE), none
            if MINIMA:
                ones = tl.dot(everywhere(w, 1, 1, ASM), a)
            sums = products(whole[g], w, a, none, BIAS, ASM)
            acc = grouped(acc, sums, ones, packed, g, by, less, GROUP, WIDTH, SCALE, LESS, SPAN, MINIMA)
    else:
        pair = tile * (N_CHUNK // 2) + chunk // 2
        w, q = quarters(codes, high, here, pair, table, HALF, BITS, SPLIT, HIGH, VALUE, ASM)
        sums, ones = none, none
        for i in tl.static_range(4):
            a = columns(x, at, is_row, chunk * 64 + i * 16, 16, N_IN, AT_ONCE)
            sums = products(q[i], w, a, sums, BIAS, ASM)
            if MINIMA:
                ones = tl.dot(everywhere(w, 1, 1, ASM), a, ones)
            if (i * 16 + 16) % GROUP == 0:
                acc = grouped(
                    acc,
                    sums,
                    ones,
                    packed,
                    i * 16 // GROUP,
                    by,
                    less,
                    GROUP,
                    WIDTH,
                    SCALE,
                    LESS,
                    SPAN,
                    MINIMA,
                )
                sums, ones = none, none
    return acc
