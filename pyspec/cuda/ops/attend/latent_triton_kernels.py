"""The Triton kernel of `attend` where keys are the values, too: latent_triton.py launches it, and `attend_merge` behind it.

As `attend_split` (triton_kernels.py), but a tile of keys is read once, for scores and values. A key's dims stand in two pieces, because
Triton's are powers of two: FIRST of them, the largest that fits, and REST, which holds the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyspec.cuda.ops.attend.triton_kernels import F32, seen_by, sequences, split_of, values
from pyspec.cuda.tri_guards import kernel, report


@triton.jit
def product(a, b, acc, KIND: tl.constexpr):
    """acc + a b; of f32 to its last bits."""
    if KIND == F32:
        return tl.dot(a, b, acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@kernel
def latent_split(
    q, k, k_scale, page_table, positions, lo, hi, seq_start, part, ml, fault,
    n_seq, n_col, n_page, n_key, n_split, n_prog, first_tile, window, scale,
    PAGE: tl.constexpr, N_HEAD: tl.constexpr, DIM: tl.constexpr, N_VALUE: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    COLS: tl.constexpr, KEYS: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr, FAR_KEYS: tl.constexpr, K_KIND: tl.constexpr,
    HALF: tl.constexpr, NATIVE: tl.constexpr, N_SEQ: tl.constexpr, STAGES: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles from the first one on, 1, programs): a tile's partial sums of every n_prog-th split.

    part [tile, split, column, N_VALUE], ml [tile, split, 2, column]: sums of weighted values, largest scores and sums of weights.
    """
    own = tl.program_id(0)
    t = first_tile + own
    every, starts, widths, before, upto = sequences(seq_start, n_seq, N_HEAD, COLS, N_SEQ)
    s = tl.sum((upto <= t).to(tl.int32), 0)
    if s >= n_seq:
        return
    start, width = tl.sum(tl.where(every == s, starts, 0), 0), tl.sum(tl.where(every == s, widths, 0), 0)
    c, d, n = tl.arange(0, COLS), tl.arange(0, FIRST), tl.arange(0, KEYS)
    at = (t - tl.sum(tl.where(every == s, before, 0), 0)) * COLS + c
    is_column = at < width * N_HEAD
    row = start + at // N_HEAD
    first, end = seen_by(positions, lo, hi, row, is_column, window, n_key)
    from_key, to_key = tl.min(first, 0), tl.max(end, 0)
    own_query = q + (row.to(tl.int64) * N_HEAD + at % N_HEAD)[None, :] * DIM
    queries = tl.load(own_query + d[:, None], mask=is_column[None, :], other=0.0).to(HALF)
    if REST > 0:
        e = FIRST + tl.arange(0, REST)
        more_queries = tl.load(
            own_query + e[:, None], mask=is_column[None, :] & (e < DIM)[:, None], other=0.0
        ).to(HALF)
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
            place = tl.where(is_page, page, 0) * PAGE + key % PAGE
            here = is_key[:, None] & (d < DIM)[None, :]
            keys = values(k, k_scale, place, 1, d, here, DIM, K_KIND, HALF, NATIVE)
            scores = product(keys, queries, tl.zeros([KEYS, COLS], dtype=tl.float32), K_KIND)
            if REST > 0:
                there = is_key[:, None] & (e < DIM)[None, :]
                more_keys = values(k, k_scale, place, 1, e, there, DIM, K_KIND, HALF, NATIVE, FIRST)
                scores = product(more_keys, more_queries, scores, K_KIND)
            seen = (key[:, None] >= first[None, :]) & (key[:, None] < end[None, :])
            scores = tl.where(seen, scores * scale, -float("inf"))
            top = tl.maximum(most, tl.max(scores, 0))
            base = tl.where(top == -float("inf"), 0.0, top)
            weights = tl.exp2(scores - base[None, :])
            less = tl.exp2(most - base)
            sums = sums * less + tl.sum(weights, 0)
            shares = weights.to(HALF)
            acc = product(tl.trans(keys), shares, acc * less[None, :], K_KIND)
            if N_VALUE > FIRST:
                more = product(tl.trans(more_keys), shares, more * less[None, :], K_KIND)
            most = top
        item = own.to(tl.int64) * n_split + j
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
