"""The kernels of `best` in Triton. Imported where they are launched only.

A logit and its column are one 64-bit integer that orders candidates: the logit's bits, in the order of numbers, above the distance to
the last column.
"""

from __future__ import annotations

import triton.language as tl

from pyspec.cuda.tri_guards import kernel


@kernel
def best_of_parts(logits, found, n_vocab, n_part, N: tl.constexpr):
    """Grid (parts, rows): the best of each part's columns, [row, part]."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    each = (n_vocab + n_part - 1) // n_part
    end = tl.minimum((part + 1) * each, n_vocab)
    best = tl.full([N], -0x7FFFFFFFFFFFFFFF, dtype=tl.int64)
    for first in range(part * each, end, N):
        column = first + tl.arange(0, N)
        x = tl.load(logits + row * n_vocab + column, mask=column < end, other=0.0)
        bits = x.to(tl.int32, bitcast=True)
        order = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
        order = tl.where(x == 0.0, 0, tl.where(x != x, 0x7FFFFFFF, order))
        own = (order.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
        best = tl.where(column < end, tl.maximum(best, own), best)
    tl.store(found + row * n_part + part, tl.max(best, 0))


@kernel
def best_of_rows(
    logits, found, tokens, pairs, n_vocab, n_part, n_row, PARTS: tl.constexpr, HAS_PAIRS: tl.constexpr
):
    """Grid (rows): tokens, or pairs [2, row] of token and logit."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    own = tl.load(found + row * n_part + part, mask=part < n_part, other=-0x7FFFFFFFFFFFFFFF)
    token = 0x7FFFFFFF - (tl.max(own, 0) & 0xFFFFFFFF)
    if HAS_PAIRS:
        tl.store(pairs + row, token.to(tl.float64))
        tl.store(pairs + n_row + row, tl.load(logits + row * n_vocab + token).to(tl.float64))
    else:
        tl.store(tokens + row, token)
