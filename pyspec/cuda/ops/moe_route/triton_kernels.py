"""The kernels of `moe_route` in Triton. Imported where they are launched only."""

from __future__ import annotations

import triton
import triton.language as tl

from pyspec.cuda.ops.recurrent.triton_kernels import sigmoid, softplus
from pyspec.cuda.tri_guards import kernel

SOFTMAX, SIGMOID, SQRTSOFTPLUS = (tl.constexpr(i) for i in range(3))  # triton.ROUTERS
NONE = tl.constexpr(-(1 << 63))


@kernel
def scores(
    x, norm, matrix, part, squares, n_row,
    N_IN: tl.constexpr, N_SCORE: tl.constexpr, PER: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (BN experts, splits of PER columns, BM rows) -> part [split, row, score] and squares [split, row], in f32 throughout."""
    split = tl.program_id(1)
    row, score = tl.program_id(2) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    is_row, is_score = row < n_row, score < N_SCORE
    acc, square = tl.zeros((BM, BN), tl.float32), tl.zeros((BM,), tl.float32)
    for start in range(split * PER, split * PER + PER, BK):
        k = start + tl.arange(0, BK)
        at = row[:, None].to(tl.int64) * N_IN + k[None, :]
        a = tl.load(x + at, mask=is_row[:, None] & (k < N_IN)[None, :], other=0.0)
        w = tl.load(
            matrix + score[None, :] * N_IN + k[:, None],
            mask=is_score[None, :] & (k < N_IN)[:, None],
            other=0.0,
        )
        square += tl.sum(a * a, 1)
        by = tl.load(norm + k, mask=k < N_IN, other=0.0)
        acc = tl.dot(a * by[None, :], w, acc, input_precision="ieee")
    to = (split * n_row + row).to(tl.int64)
    tl.store(
        part + to[:, None] * N_SCORE + score[None, :], acc, mask=is_row[:, None] & is_score[None, :]
    )
    if tl.program_id(0) == 0:
        tl.store(squares + to, square, mask=is_row)


@triton.jit
def ordered(score):
    """int64 that ranks as the score does: NaN first, as torch sorts, and -0 as 0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(score != score, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return bits.to(tl.int64) << 32


@triton.jit
def keep_groups(
    own, N_GROUP: tl.constexpr, GROUPS: tl.constexpr, OF_GROUP: tl.constexpr, MANY: tl.constexpr, N_KEPT: tl.constexpr
):  # fmt: skip
    """own [N_GROUP, OF_GROUP]: scores, which become minus infinity in all but the N_KEPT groups whose two best sum to most; of equal
    groups the first are kept. GROUPS, MANY: powers of two that hold both sizes."""
    g, i = tl.arange(0, GROUPS), tl.arange(0, MANY)
    at, is_one = g[:, None] * OF_GROUP + i[None, :], (g < N_GROUP)[:, None] & (i < OF_GROUP)[None, :]
    score = tl.load(own + at, mask=is_one, other=0.0)
    key = tl.where(is_one, ordered(score) | (MANY - 1 - i).to(tl.int64)[None, :], NONE)
    worth = tl.zeros((GROUPS,), tl.float32)
    for k in tl.static_range(2):
        if k < OF_GROUP:
            best = (MANY - 1 - (tl.max(key, 1) & 0xFFFFFFFF)).to(tl.int32)
            is_best = i[None, :] == best[:, None]
            worth += tl.sum(tl.where(is_best & is_one, score, 0.0), 1)
            key = tl.where(is_best, NONE, key)
    rank = tl.where(g < N_GROUP, ordered(worth) | (GROUPS - 1 - g).to(tl.int64), NONE)
    is_kept = tl.zeros((GROUPS,), tl.int32)
    for _ in range(N_KEPT):
        next_group = (GROUPS - 1 - (tl.max(rank, 0) & 0xFFFFFFFF)).to(tl.int32)
        is_kept = tl.where(g == next_group, 1, is_kept)
        rank = tl.where(g == next_group, NONE, rank)
    tl.debug_barrier()  # every score is read
    tl.store(own + at, tl.where(is_kept[:, None] != 0, score, float("-inf")), mask=is_one)
    tl.debug_barrier()


@kernel
def choose(
    part, squares, bias, given, ids, weights, gate, factors, probabilities, scored, n_row, eps, scale,
    N_IN: tl.constexpr, N_EXPERT: tl.constexpr, WIDE: tl.constexpr, N_USED: tl.constexpr, USED: tl.constexpr, SPLITS: tl.constexpr,
    ROUTER: tl.constexpr, RENORM: tl.constexpr, BIASED: tl.constexpr, SHIFTED: tl.constexpr, GATED: tl.constexpr, GIVEN: tl.constexpr, FACTORED: tl.constexpr, LEAST: tl.constexpr,
    N_GROUP: tl.constexpr, GROUPS: tl.constexpr, OF_GROUP: tl.constexpr, MANY: tl.constexpr, N_KEPT: tl.constexpr,
):  # fmt: skip
    """Grid (rows): the N_USED best of N_EXPERT, of equal ones the lower. probabilities [row, N_EXPERT]: weights of experts;
    scored [row, N_EXPERT]: with groups, what they are chosen by."""
    row, expert, place = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE), tl.arange(0, USED)
    n_score: tl.constexpr = N_EXPERT + GATED
    is_one = expert < N_EXPERT
    logit, square, last = tl.zeros((WIDE,), tl.float32), 0.0, 0.0
    for split in tl.static_range(SPLITS):
        own = part + (split * n_row + row) * n_score
        logit += tl.load(own + expert, mask=is_one, other=0.0)
        square += tl.load(squares + split * n_row + row)
        if GATED:
            last += tl.load(own + N_EXPERT)
    by = tl.rsqrt(square / N_IN + eps)
    logit = logit * by
    if SHIFTED:
        logit += tl.load(bias + expert, mask=is_one, other=0.0)
    if GATED:
        tl.store(gate + row, sigmoid(last * by))
    if ROUTER == SOFTMAX:
        logit = tl.where(is_one, logit, float("-inf"))
        p = tl.exp(logit - tl.max(logit, 0))
        p = p / tl.sum(p, 0)
    elif ROUTER == SIGMOID:
        p = sigmoid(logit)
    else:
        p = tl.sqrt(softplus(logit))
    tl.store(probabilities + row * N_EXPERT + expert, p, mask=is_one)
    is_used = place < N_USED
    if GIVEN:
        chosen = tl.load(given + row * N_USED + place, mask=is_used, other=0)
        chosen = tl.minimum(tl.maximum(chosen, 0), N_EXPERT - 1)
    else:
        score = logit
        if BIASED:
            score = p + tl.load(bias + expert, mask=is_one, other=0.0)
        if N_GROUP > 1:
            if not BIASED:
                score = p
            own = scored + row * N_EXPERT
            tl.store(own + expert, score, mask=is_one)
            tl.debug_barrier()
            keep_groups(own, N_GROUP, GROUPS, OF_GROUP, MANY, N_KEPT)
            score = tl.load(own + expert, mask=is_one, other=0.0)
        key = tl.where(is_one, ordered(score) | (WIDE - 1 - expert).to(tl.int64), NONE)
        chosen = tl.zeros((USED,), tl.int32)
        for i in range(N_USED):
            best = (WIDE - 1 - (tl.max(key, 0) & 0xFFFFFFFF)).to(tl.int32)
            chosen = tl.where(place == i, best, chosen)
            key = tl.where(expert == best, NONE, key)
    tl.debug_barrier()  # every probability is written
    weight = tl.load(probabilities + row * N_EXPERT + chosen, mask=is_used, other=0.0)
    if RENORM:
        weight = weight / tl.maximum(tl.sum(weight, 0), LEAST)
    weight *= scale
    if FACTORED:
        weight *= tl.load(factors + chosen, mask=is_used, other=0.0)
    tl.store(ids + row * N_USED + place, chosen, mask=is_used)
    tl.store(weights + row * N_USED + place, weight, mask=is_used)
