"""The kernels of `moe` in Triton. Imported where they are launched only.

A pair is a row and an expert that it takes: row * N_USED + choice, and behind those, for each piece of the shared expert, a pair a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyspec.cuda.ops.linear.triton_kernels import summed
from pyspec.cuda.ops.linear.triton_tiles import chunk_sums
from pyspec.cuda.ops.recurrent.triton_kernels import sigmoid
from pyspec.cuda.tri_guards import kernel

NONE = tl.constexpr(1 << 30)  # an expert that none is
SWIGLU, RELU2, GEGLU, OAI, SITU = (tl.constexpr(i) for i in range(5))  # ref.ACTS


@triton.jit
def expert_of(ids, pair, is_pair, N_EXPERT: tl.constexpr):
    """As in the CUDA kernels, clamped; NONE without a pair."""
    id = tl.load(ids + pair, mask=is_pair, other=0)
    return tl.where(is_pair, tl.minimum(tl.maximum(id, 0), N_EXPERT - 1), NONE)


@kernel
def lists(
    ids, order, items, counter, n_pair,
    N_EXPERT: tl.constexpr, BN: tl.constexpr, COMPACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (experts): the pairs of each, in their order -> order [place]. Items have BN pairs at most.

    items  COMPACT: {expert, first place, pairs} each, in any order, `counter` of them; else {first place, pairs} where the first pair of one
           would stand by its number, and no pairs everywhere else
    """
    expert, at = tl.program_id(0), tl.arange(0, BLOCK)
    first, n = 0, 0
    for start in range(0, n_pair, BLOCK):
        id = expert_of(ids, start + at, start + at < n_pair, N_EXPERT)
        first += tl.sum((id < expert).to(tl.int32), 0)
        n += tl.sum((id == expert).to(tl.int32), 0)
    if n > 0:
        if COMPACT:
            n_item = (n + BN - 1) // BN
            to = tl.atomic_add(counter, n_item)
            for i in range(n_item):
                item = items + 3 * (to + i)
                tl.store(item, expert)
                tl.store(item + 1, first + i * BN)
                tl.store(item + 2, tl.minimum(BN, n - i * BN))
        before = 0
        for start in range(0, n_pair, BLOCK):
            pair = start + at
            is_own = expert_of(ids, pair, pair < n_pair, N_EXPERT) == expert
            own = is_own.to(tl.int32)
            rank = before + tl.cumsum(own, 0) - own
            tl.store(order + first + rank, pair, mask=is_own)
            if not COMPACT:
                tl.store(items + 2 * pair, first + rank, mask=is_own)
                tl.store(
                    items + 2 * pair + 1,
                    tl.where(rank % BN == 0, tl.minimum(BN, n - rank), 0),
                    mask=is_own,
                )
            before += tl.sum(own, 0)


@triton.jit
def item_of(
    item, ids, order, items, counter, n_row, n_shared,
    BN: tl.constexpr, N_EXPERT: tl.constexpr, N_USED: tl.constexpr, PIECES: tl.constexpr, LISTED: tl.constexpr, COMPACT: tl.constexpr,
):  # fmt: skip
    """(expert, number of pairs, pairs [BN]). The first n_shared items are those of the shared expert's pieces."""
    j = tl.arange(0, BN)
    own = item - n_shared
    if LISTED:
        if COMPACT:
            is_one = (own >= 0) & (own < tl.load(counter))
            expert = tl.load(items + 3 * own, mask=is_one, other=0)
            first = tl.load(items + 3 * own + 1, mask=is_one, other=0)
            n = tl.load(items + 3 * own + 2, mask=is_one, other=0)
        else:
            is_one = own >= 0
            expert = tl.load(ids + own, mask=is_one, other=0)
            first = tl.load(items + 2 * own, mask=is_one, other=0)
            n = tl.load(items + 2 * own + 1, mask=is_one, other=0)
        pair = tl.load(order + first + j, mask=j < n, other=0)
    else:
        expert = tl.load(ids + own, mask=own >= 0, other=0)
        n = tl.where(own >= 0, 1, 0)
        pair = own + j
    expert = tl.minimum(tl.maximum(expert, 0), N_EXPERT - 1)
    if PIECES > 0:
        n_block = (n_row + BN - 1) // BN
        piece, start = item // n_block, item % n_block * BN
        is_shared = item < n_shared
        expert = tl.where(is_shared, N_EXPERT + piece, expert)
        n = tl.where(is_shared, tl.minimum(BN, n_row - start), n)
        pair = tl.where(is_shared, n_row * (N_USED + piece) + start + j, pair)
    return expert, n, pair


@kernel
def products(
    x, powers, codes, high, scales, supers, table, part, ids, order, items, counter, n_row, n_shared,
    N_IN: tl.constexpr, N_CHUNK: tl.constexpr, N_SPAN: tl.constexpr, BITS: tl.constexpr, SPLIT: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, LESS: tl.constexpr, SPAN: tl.constexpr,
    MINIMA: tl.constexpr, ASM: tl.constexpr, AT_ONCE: tl.constexpr,
    UNIT: tl.constexpr, STEP: tl.constexpr, PER: tl.constexpr, TURNS: tl.constexpr, STAGES: tl.constexpr, X_STEP: tl.constexpr, INNER: tl.constexpr,
    BN: tl.constexpr, N_EXPERT: tl.constexpr, N_USED: tl.constexpr, PIECES: tl.constexpr, LISTED: tl.constexpr, COMPACT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, items, splits): sums over PER steps of STEP chunks of 64 columns -> part [split, pair, tile * 64].

    TURNS  splits that one program makes one after the other and adds in their order, as a reader of several does
    INNER  x has the batch's rows; else a row for each pair, each 64 columns over a power [pair, chunk] of their own
    """
    n_tile, split = tl.num_programs(0), tl.program_id(2)
    expert, n, pair = item_of(
        tl.program_id(1),
        ids,
        order,
        items,
        counter,
        n_row,
        n_shared,
        BN,
        N_EXPERT,
        N_USED,
        PIECES,
        LISTED,
        COMPACT,
    )
    is_row, out = tl.arange(0, BN) < n, tl.arange(0, 64)
    row = pair
    if INNER:
        n_routed = n_row * N_USED
        row = tl.where(pair < n_routed, pair // N_USED, (pair - n_routed) % n_row)
    tile = expert.to(tl.int64) * n_tile + tl.program_id(0)
    total = tl.zeros((64, BN), tl.float32)
    for own in range(split * TURNS, split * TURNS + TURNS):
        acc = tl.zeros((64, BN), tl.float32)
        for step in tl.range(
            own * PER,
            tl.where(n > 0, tl.minimum(own * PER + PER, N_CHUNK // STEP), own * PER),
            num_stages=STAGES,
        ):
            for half in tl.static_range(STEP):
                chunk = step * STEP + half
                if INNER:
                    acc = chunk_sums(
                        acc, x, row.to(tl.int64) * X_STEP, is_row, codes, high, scales, supers, table, tile, chunk,
                        N_IN, N_CHUNK, N_SPAN, BITS, SPLIT, HIGH, GROUP, BIAS, VALUE, WIDTH, SCALE, LESS, SPAN, MINIMA, ASM, AT_ONCE, half,
                    )  # fmt: skip
                else:
                    # Of a chunk without columns it does not matter
                    place = tl.minimum(chunk, X_STEP // 64 - 1)
                    power = tl.load(
                        powers + row.to(tl.int64) * (X_STEP // 64) + place, mask=is_row, other=0.0
                    )
                    acc += power[None, :] * chunk_sums(
                        tl.zeros((64, BN), tl.float32), x, row.to(tl.int64) * X_STEP, is_row, codes, high, scales, supers,
                        table, tile, chunk,
                        N_IN, N_CHUNK, N_SPAN, BITS, SPLIT, HIGH, GROUP, BIAS, VALUE, WIDTH, SCALE, LESS, SPAN, MINIMA, ASM, AT_ONCE, half,
                    )  # fmt: skip
        total += acc * UNIT
    n_pair = n_row * (N_USED + PIECES)
    to = (
        (split * n_pair + pair[None, :]).to(tl.int64) * (n_tile * 64)
        + tl.program_id(0) * 64
        + out[:, None]
    )
    tl.store(part + to, total, mask=is_row[None, :])


@kernel
def between(
    part, powers, ids, factors, biases, h, h_powers, n_row,
    N_FF: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr, N_EXPERT: tl.constexpr, N_USED: tl.constexpr, PIECES: tl.constexpr,
    ACT: tl.constexpr, POWERS: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, GATE_LIMIT: tl.constexpr, LIMIT: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (pairs, stretches of BLOCKS * 64 columns): the splits' sums, activated -> h [pair, WIDE] f16, of 64 columns over a power of
    two each. part: gates and, WIDE behind them, ups, or ups alone. factors [expert, 2]: of gates and ups. biases [expert, (gates and) ups, N_FF]."""
    pair, block = tl.program_id(0), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    n_routed, n_pair = n_row * N_USED, n_row * (N_USED + PIECES)
    row, expert = pair // N_USED, tl.load(ids + pair, mask=pair < n_routed, other=0)
    expert = tl.minimum(tl.maximum(expert, 0), N_EXPERT - 1)
    if PIECES > 0:
        is_shared = pair >= n_routed
        row = tl.where(is_shared, (pair - n_routed) % n_row, row)
        expert = tl.where(is_shared, N_EXPERT + (pair - n_routed) // n_row, expert)
    column = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    is_column = column < N_FF
    GATED: tl.constexpr = ACT != RELU2
    n_wide: tl.constexpr = 2 * WIDE if GATED else WIDE
    at, step = pair.to(tl.int64) * n_wide + column, n_pair.to(tl.int64) * n_wide
    y = summed(part, step, at, is_column, SPLITS)
    power = 1.0
    if POWERS:
        power = tl.load(powers + row)
    if GATED:
        up = summed(part + WIDE, step, at, is_column, SPLITS) * power
        y = y * power
        if SCALED:
            y = y * tl.load(factors + 2 * expert)
            up = up * tl.load(factors + 2 * expert + 1)
        if BIASED:
            own_biases = biases + expert.to(tl.int64) * (2 * N_FF) + column
            y += tl.load(own_biases, mask=is_column, other=0.0)
            up += tl.load(own_biases + N_FF, mask=is_column, other=0.0)
        if ACT == SITU:  # GATE_LIMIT and LIMIT are its betas
            if LIMIT > 0.0:
                up = LIMIT * (2.0 * sigmoid(2.0 * up / LIMIT) - 1.0)
        elif LIMIT > 0.0:
            y = tl.where(y > GATE_LIMIT, GATE_LIMIT, y)  # what is no number stays none
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        if ACT == SITU:
            y = GATE_LIMIT * (2.0 * sigmoid(2.0 * y / GATE_LIMIT) - 1.0) * sigmoid(y) * up
        elif ACT == OAI:
            y = y * sigmoid(1.702 * y) * (up + 1.0)
        elif ACT == GEGLU:
            y = y * sigmoid(1.5957691216 * y * (1.0 + 0.044715 * y * y)) * up
        else:
            y = y * sigmoid(y) * up
    else:
        y = y * power
        if SCALED:
            y = y * tl.load(factors + 2 * expert + 1)
        if BIASED:
            y += tl.load(biases + expert.to(tl.int64) * N_FF + column, mask=is_column, other=0.0)
        y = tl.where(y > 0.0, y, tl.where(y == y, 0.0, y))
        y = y * y
    bits = tl.max(tl.abs(y), 1).to(tl.int32, bitcast=True) & 0x7F800000
    own = tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))
    is_block = block < WIDE // 64
    tl.store(
        h + pair.to(tl.int64) * WIDE + column, (y / own[:, None]).to(tl.float16), mask=is_block[:, None]
    )
    tl.store(h_powers + pair.to(tl.int64) * (WIDE // 64) + block, own, mask=is_block)


@kernel
def combine(
    part, ids, weights, factors, biases, shared, gate, residual, out, n_row,
    N_OUT: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr, N_EXPERT: tl.constexpr, N_USED: tl.constexpr, PIECES: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, SHARED: tl.constexpr, GATE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, stretches of 512 columns): outputs of a row's experts times its weights, in order of choice; the shared expert; the rest."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * 512 + tl.arange(0, 512)
    is_column = column < N_OUT
    step = n_row.to(tl.int64) * ((N_USED + PIECES) * WIDE)
    total = tl.zeros((512,), tl.float32)
    for i in tl.static_range(N_USED):
        pair = row * N_USED + i
        y = summed(part, step, pair * WIDE + column, is_column, SPLITS)
        if SCALED or BIASED:
            expert = tl.minimum(tl.maximum(tl.load(ids + pair), 0), N_EXPERT - 1)
            if SCALED:
                y = y * tl.load(factors + expert)
            if BIASED:
                y += tl.load(biases + expert.to(tl.int64) * N_OUT + column, mask=is_column, other=0.0)
        total += y * tl.load(weights + pair)
    if SHARED:
        more = tl.load(shared + row * N_OUT + column, mask=is_column, other=0.0)
    if PIECES > 0:
        more = tl.zeros((512,), tl.float32)
        for piece in tl.static_range(PIECES):
            pair = n_row * (N_USED + piece) + row
            y = summed(part, step, pair * WIDE + column, is_column, SPLITS)
            if SCALED:
                y = y * tl.load(factors + N_EXPERT + piece)
            more += y
    if SHARED or PIECES > 0:
        if GATE:
            more = more * tl.load(gate + row)
        total += more
    if RESIDUAL:
        total = tl.load(residual + row * N_OUT + column, mask=is_column, other=0.0) + total
    tl.store(out + row * N_OUT + column, total, mask=is_column)
