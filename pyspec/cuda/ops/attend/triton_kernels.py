"""The Triton kernels of `attend`. Only a launch imports them; triton.py describes how they work together.

Scores are transposed, [key, column]; a column is a row and head of a KV head's group. Keys are the rows of the tensor cores' products
for any number of columns, so a column's bits do not depend on the others. Keys are cut at absolute positions: SHORT keys (LONG in a
sequence of more than FAR_KEYS) give one partial sum, and those of a row are added in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pyspec.cuda.tri_guards import kernel, report

FAR = tl.constexpr(1 << 30)
LOG2E = tl.constexpr(1.4426950408889634)
# KIND of cuda.py's KINDS: the others are plain numbers
F32, Q8_0, F8 = tl.constexpr(0), tl.constexpr(3), tl.constexpr(4)


@triton.jit
def sequences(seq_start, n_seq, GROUP: tl.constexpr, COLS: tl.constexpr, N_SEQ: tl.constexpr):
    """Of all sequences: number, first row, width, and how many tiles of columns stand before each and up to its end."""
    s = tl.arange(0, N_SEQ)
    start = tl.load(seq_start + s, mask=s < n_seq, other=0)
    end = tl.load(seq_start + s + 1, mask=s < n_seq, other=0)
    width = tl.maximum(end - start, 0)
    tiles = (width * GROUP + COLS - 1) // COLS
    upto = tl.cumsum(tiles, 0)
    return s, start, width, upto - tiles, upto


@triton.jit
def seen_by(positions, lo, hi, row, mask, window, n_key):
    """The keys of rows, [first, end), within the table; none where the mask is not."""
    first = tl.load(lo + row, mask=mask, other=0)
    if window > 0:
        first = tl.maximum(first, tl.load(positions + row, mask=mask, other=0) - (window - 1))
    if window < 0:  # of chunks of as many positions
        position = tl.load(positions + row, mask=mask, other=0)
        first = tl.maximum(first, position - position % -window)
    end = tl.load(hi + row, mask=mask, other=0)
    first = tl.minimum(tl.maximum(first, 0), n_key).to(tl.int32)
    end = tl.minimum(tl.maximum(end, 0), n_key).to(tl.int32)
    return tl.where(mask, first, FAR), tl.where(mask, end, 0)


@triton.jit
def split_of(hi, start, width, n_key, SHORT: tl.constexpr, LONG: tl.constexpr, FAR_KEYS: tl.constexpr):
    """Keys of a sequence's splits: few where it is short, so that there are enough of them."""
    reach = tl.load(hi + start + width - 1)
    return tl.where(reach <= FAR_KEYS, SHORT, LONG)


@triton.jit
def values(
    codes,
    scales,
    at,
    heads,
    d,
    mask,
    DIM: tl.constexpr,
    KIND: tl.constexpr,
    HALF: tl.constexpr,
    NATIVE: tl.constexpr,
    FIRST: tl.constexpr = 0,
):
    """[key, dim] of keys or values as tensor cores take them. at: numbers of key and head in the pool. FIRST: the first of the dims `d`."""
    x = tl.load(codes + at[:, None] * DIM + d[None, :], mask=mask, other=0)
    if KIND == Q8_0:
        BLOCKS: tl.constexpr = d.shape[0] // 32
        block = FIRST // 32 + tl.arange(0, BLOCKS)
        is_there = (tl.max(mask.to(tl.int32), 1) != 0)[:, None] & (block < DIM // 32)[None, :]
        scale = tl.load(scales + at[:, None] * (DIM // 32) + block[None, :], mask=is_there, other=0.0)
        # 1024 and the code, 128 above
        bits = (x.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        whole = tl.reshape(bits.to(tl.float16, bitcast=True) - 1152.0, [at.shape[0], BLOCKS, 32])
        return tl.reshape(whole * scale[:, :, None], [at.shape[0], BLOCKS * 32]).to(HALF)
    if KIND == F8 and NATIVE:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    if KIND == F8:  # the bits of e4m3 in f16's places are 2^-8 of it; all ones are no number
        size = (x & 0x7F).to(tl.uint16)
        bits = (size << 7) | ((x & 0x80).to(tl.uint16) << 8)
        bits = tl.where(size == 0x7F, 0x7E00, bits).to(tl.uint16)
        return bits.to(tl.float16, bitcast=True) * 256.0
    return x.to(HALF)


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """CAP * tanh(score / CAP) of scores in log2 units: near 0 a quotient of polynomials, because exponentials lose digits there."""
    y = scores * (1.0 / (CAP * LOG2E))
    z = y * y
    near = y * (945.0 + z * (105.0 + z)) / (945.0 + z * (420.0 + z * 15.0))
    far = 1.0 - 2.0 / (1.0 + tl.exp2(y * (2.0 * LOG2E)))
    return tl.where(z < 1.0, near, far) * (CAP * LOG2E)


@triton.jit
def product(a, b, acc, KIND: tl.constexpr):
    """acc + a b; of f32 to its last bits."""
    if KIND == F32:
        return tl.dot(a, b, acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@kernel
def attend_split(
    q, k, v, k_scale, v_scale, page_table, positions, lo, hi, seq_start, part, ml, fault,
    n_seq, n_col, n_page, n_key, n_split, n_prog, first_tile, window, scale,
    PAGE: tl.constexpr, N_KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, N_VALUE: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    COLS: tl.constexpr, KEYS: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr, FAR_KEYS: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    K_HALF: tl.constexpr, V_HALF: tl.constexpr, NATIVE: tl.constexpr, N_SEQ: tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr, ALONE: tl.constexpr,
    OP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles from the first one on, KV heads, programs): a tile's partial sums of every n_prog-th split.

    part [tile, kv, split, column, N_VALUE], ml [tile, kv, split, 2, column]: sums of weighted values, largest scores and sums of weights.
    ALONE: keys are the values, too, and read once. Their dims stand in two pieces, because Triton's are powers of two: FIRST of them and
    REST, which holds the others; 0: there are none.
    """
    own, h = tl.program_id(0), tl.program_id(1) if N_KV > 1 else 0
    t = first_tile + own
    every, starts, widths, before, upto = sequences(seq_start, n_seq, GROUP, COLS, N_SEQ)
    s = tl.sum((upto <= t).to(tl.int32), 0)
    if s >= n_seq:
        return
    start, width = tl.sum(tl.where(every == s, starts, 0), 0), tl.sum(tl.where(every == s, widths, 0), 0)
    c, d, n = tl.arange(0, COLS), tl.arange(0, FIRST), tl.arange(0, KEYS)
    at = (t - tl.sum(tl.where(every == s, before, 0), 0)) * COLS + c
    is_column = at < width * GROUP
    row = start + at // GROUP
    first, end = seen_by(positions, lo, hi, row, is_column, window, n_key)
    from_key, to_key = tl.min(first, 0), tl.max(end, 0)
    head = h * GROUP + at % GROUP
    own_query = q + (row.to(tl.int64) * (N_KV * GROUP) + head)[None, :] * DIM
    wanted = is_column[None, :] & (d < DIM)[:, None]
    queries = tl.load(own_query + d[:, None], mask=wanted, other=0.0).to(K_HALF)
    if REST > 0:
        e = FIRST + tl.arange(0, REST)
        more_wanted = is_column[None, :] & (e < DIM)[:, None]
        more_queries = tl.load(own_query + e[:, None], mask=more_wanted, other=0.0).to(K_HALF)
    pages = page_table + s.to(tl.int64) * n_col
    worst = tl.zeros([KEYS], dtype=tl.int64)  # a page that does not exist
    split = split_of(hi, start, width, n_key, SHORT, LONG, FAR_KEYS)
    to_split = tl.minimum((to_key + split - 1) // split, n_split)
    for j in range(from_key // split + tl.program_id(2), to_split, n_prog):
        most = tl.full([COLS], -float("inf"), dtype=tl.float32)
        sums = tl.zeros([COLS], dtype=tl.float32)
        acc = tl.zeros([FIRST, COLS], dtype=tl.float32)
        if N_VALUE > FIRST:
            more = tl.zeros([REST, COLS], dtype=tl.float32)
        begin = tl.maximum(j * split, from_key // KEYS * KEYS)
        for key0 in tl.range(begin, tl.minimum((j + 1) * split, to_key), KEYS, num_stages=STAGES):
            key = key0 + n
            is_key = (key >= from_key) & (key < to_key)
            page = tl.load(pages + key // PAGE, mask=is_key, other=0)
            is_page = (page >= 0) & (page < n_page)
            worst = tl.where(is_page, worst, page)
            place = (tl.where(is_page, page, 0) * PAGE + key % PAGE) * N_KV + h
            here = is_key[:, None] & (d < DIM)[None, :]
            keys = values(k, k_scale, place, N_KV, d, here, DIM, K_KIND, K_HALF, NATIVE)
            scores = product(keys, queries, tl.zeros([KEYS, COLS], dtype=tl.float32), K_KIND)
            if REST > 0:
                there = is_key[:, None] & (e < DIM)[None, :]
                more_keys = values(k, k_scale, place, N_KV, e, there, DIM, K_KIND, K_HALF, NATIVE, FIRST)
                scores = product(more_keys, more_queries, scores, K_KIND)
            seen = (key[:, None] >= first[None, :]) & (key[:, None] < end[None, :])
            scores = scores * scale
            if CAP > 0.0:
                scores = capped(scores, CAP)
            scores = tl.where(seen, scores, -float("inf"))
            top = tl.maximum(most, tl.max(scores, 0))
            base = tl.where(top == -float("inf"), 0.0, top)
            weights = tl.exp2(scores - base[None, :])
            less = tl.exp2(most - base)
            sums = sums * less + tl.sum(weights, 0)
            if ALONE:
                vals = keys
            else:
                vals = values(v, v_scale, place, N_KV, d, here, DIM, V_KIND, V_HALF, NATIVE)
            acc = acc * less[None, :]
            acc = product(tl.trans(vals), weights.to(V_HALF), acc, V_KIND)
            if N_VALUE > FIRST:
                more = product(tl.trans(more_keys), weights.to(V_HALF), more * less[None, :], V_KIND)
            most = top
        item = (own * N_KV + h).to(tl.int64) * n_split + j
        to = part + (item * COLS + c)[None, :] * N_VALUE
        tl.store(to + d[:, None], acc, mask=is_column[None, :] & (d < N_VALUE)[:, None])
        if N_VALUE > FIRST:
            tl.store(to + e[:, None], more, mask=is_column[None, :] & (e < N_VALUE)[:, None])
        tl.store(ml + item * (2 * COLS) + c, most)
        tl.store(ml + item * (2 * COLS) + COLS + c, sums)
    high, low = tl.max(worst, 0), tl.min(worst, 0)
    if to_key > n_split * split:  # a row of a sequence sees far beyond the keys of its last row
        report(fault, OP, s, to_key // split, n_split)
    if (high != 0) | (low != 0):
        index = tl.where((high > 0x7FFFFFFF) | (high == 0), -1, high)
        report(fault, OP, s, index.to(tl.int32), n_page)


@kernel
def attend_merge(
    part, ml, positions, lo, hi, row_seq, seq_start, sinks, out,
    n_seq, n_key, n_split, first_tile, n_tile, window,
    N_KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PIECE: tl.constexpr, COLS: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr, FAR_KEYS: tl.constexpr,
    N_SEQ: tl.constexpr, AT_ONCE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, heads, pieces of a head): a row's partial sums in the order of their keys, if its tile is one of these."""
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    to = out + (row.to(tl.int64) * (N_KV * GROUP) + head) * DIM + d
    s = tl.load(row_seq + row)
    if (s < 0) | (s >= n_seq):  # padding tiles
        tl.store(to, tl.zeros([PIECE], dtype=tl.float32), mask=d < DIM)
        return
    every, starts, widths, before, _ = sequences(seq_start, n_seq, GROUP, COLS, N_SEQ)
    start, width = tl.sum(tl.where(every == s, starts, 0), 0), tl.sum(tl.where(every == s, widths, 0), 0)
    at = (row - start) * GROUP + head % GROUP
    tile = tl.sum(tl.where(every == s, before, 0), 0) + at // COLS - first_tile
    if (tile < 0) | (tile >= n_tile):
        return
    item0 = (tile * N_KV + head // GROUP).to(tl.int64) * n_split
    column = at % COLS
    first, end = seen_by(positions, lo, hi, row, True, window, n_key)
    j = tl.arange(0, AT_ONCE)
    split = split_of(hi, start, width, n_key, SHORT, LONG, FAR_KEYS)
    from_split, to_split = (
        first // split,
        tl.where(end > first, tl.minimum((end + split - 1) // split, n_split), 0),
    )
    top = -float("inf")
    for j0 in range(from_split, to_split, AT_ONCE):
        most = tl.load(
            ml + (item0 + j0 + j) * (2 * COLS) + column, mask=j0 + j < to_split, other=-float("inf")
        )
        top = tl.maximum(top, tl.max(most, 0))
    sums = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2E
        top = tl.maximum(top, sink)
        sums = tl.exp2(sink - top)
    acc = tl.zeros([PIECE], dtype=tl.float32)
    for j0 in range(from_split, to_split, AT_ONCE):
        item, is_split = item0 + j0 + j, j0 + j < to_split
        most = tl.load(ml + item * (2 * COLS) + column, mask=is_split, other=-float("inf"))
        less = tl.where(most == -float("inf"), 0.0, tl.exp2(most - top))
        sums += tl.sum(
            less * tl.load(ml + item * (2 * COLS) + COLS + column, mask=is_split, other=0.0), 0
        )
        there = is_split[:, None] & (d < DIM)[None, :]
        values_of = tl.load(
            part + (item * COLS + column)[:, None] * DIM + d[None, :], mask=there, other=0.0
        )
        acc += tl.sum(less[:, None] * values_of, 0)
    tl.store(to, tl.where(sums > 0.0, acc / sums, 0.0), mask=d < DIM)


HALVES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.float16,
    torch.float8_e4m3fn: tl.float16,
}
"""Operand type of tensor cores, by the type of keys or values."""
