"""The kernels of `gdn` in Triton, in two launches a layer as gdn.cu. Imported where they are launched only.

gdn_conv  a program a head: accepted records to a buffer, the window moved, rows through conv, silu and l2 norm, to records, too, if
          they are a verify's.
gdn_rows  a program some of a head's columns: records, then rows, one loop over both. So a state does not depend on how its tokens came.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyspec.cuda.ops.recurrent.triton_kernels import (
    convolved,
    copied,
    moved_window,
    put_window,
    read_seq,
    sigmoid,
    softplus,
    window_of,
)
from pyspec.cuda.tri_guards import kernel

# What rows and records have beside each other: [sequences * width + rows, ...]; records of sequence s from s * width on.


@kernel
def gdn_conv(
    m, alpha, beta, a, dt_bias, conv_w, conv, rec_k, rec_v, rec_g, rec_b, q, k, v, g, b,
    seq_slot, seq_start, seq_fold, seq_keep, fault,
    m_stride, gate_stride, n_seq, n_slot, width, n_row, eps,
    N_K: tl.constexpr, N_V: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """Grid (key heads + value heads, sequences, stretches of rows)."""
    KD: tl.constexpr = N_K * DIM
    VD: tl.constexpr = N_V * DIM
    CHANNELS: tl.constexpr = 2 * KD + VD
    unit, s, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, start, n, fold, kept = read_seq(seq_slot, seq_start, seq_fold, seq_keep, s, n_slot, width, n_row, fault, OP)
    if n + fold == 0:
        return
    d, one = tl.arange(0, DIM), tl.arange(0, 1)
    none = tl.zeros([DIM], dtype=tl.float32)
    slot_row, old_row = slot.to(tl.int64) * width, s.to(tl.int64) * width
    new_row = n_seq.to(tl.int64) * width + start
    window = conv + slot.to(tl.int64) * (width + 3) * CHANNELS
    rows = m + start.to(tl.int64) * m_stride
    if unit < N_K:
        head = unit
        own = head * DIM + d
        q0, q1, q2 = window_of(window, fold, own, CHANNELS)
        k0, k1, k2 = window_of(window, fold, KD + own, CHANNELS)
        if z == 0:
            copied(rec_k, k, slot_row, old_row, fold, own, d >= 0, KD, ROWS)
            q_moved = moved_window(window, fold, rows, m_stride, n, kept, own, CHANNELS)
            k_moved = moved_window(window, fold, rows, m_stride, n, kept, KD + own, CHANNELS)
            tl.debug_barrier()  # everything old is read
            put_window(window, q_moved, own, CHANNELS)
            put_window(window, k_moved, KD + own, CHANNELS)
        for t0 in range(z * ROWS, n, tl.num_programs(2) * ROWS):
            t = t0 + tl.arange(0, ROWS)
            is_row = (t < n)[:, None]
            y, x = convolved(rows, m_stride, t, n, q0, q1, q2, conv_w, own, none)
            y = y * tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
            tl.store(q + (start + t).to(tl.int64)[:, None] * KD + own[None, :], y, mask=is_row)
            is_verified = is_row & (kept == 0)
            at = window + (t + 3).to(tl.int64)[:, None] * CHANNELS + own[None, :]
            tl.store(at, x, mask=is_verified)
            y, x = convolved(rows, m_stride, t, n, k0, k1, k2, conv_w, KD + own, none)
            y = y * tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
            tl.store(k + (new_row + t)[:, None] * KD + own[None, :], y, mask=is_row)
            tl.store(at + KD, x, mask=is_verified)
            tl.store(rec_k + (slot_row + t)[:, None] * KD + own[None, :], y, mask=is_verified)
    else:
        head = unit - N_K
        own = head * DIM + d
        v0, v1, v2 = window_of(window, fold, 2 * KD + own, CHANNELS)
        if z == 0:
            copied(rec_v, v, slot_row, old_row, fold, own, d >= 0, VD, ROWS)
            copied(rec_g, g, slot_row, old_row, fold, head + one, one == 0, N_V, ROWS)
            copied(rec_b, b, slot_row, old_row, fold, head + one, one == 0, N_V, ROWS)
            moved = moved_window(window, fold, rows, m_stride, n, kept, 2 * KD + own, CHANNELS)
            tl.debug_barrier()
            put_window(window, moved, 2 * KD + own, CHANNELS)
        slope, bias = tl.load(a + head), tl.load(dt_bias + head)
        for t0 in range(z * ROWS, n, tl.num_programs(2) * ROWS):
            t = t0 + tl.arange(0, ROWS)
            is_row = t < n
            is_verified = is_row & (kept == 0)
            gate = (start + t).to(tl.int64) * gate_stride + head
            decay = slope * softplus(tl.load(alpha + gate, mask=is_row, other=0.0) + bias)
            strength = sigmoid(tl.load(beta + gate, mask=is_row, other=0.0))
            tl.store(g + (new_row + t) * N_V + head, decay, mask=is_row)
            tl.store(b + (new_row + t) * N_V + head, strength, mask=is_row)
            tl.store(rec_g + (slot_row + t) * N_V + head, decay, mask=is_verified)
            tl.store(rec_b + (slot_row + t) * N_V + head, strength, mask=is_verified)
            y, x = convolved(rows, m_stride, t, n, v0, v1, v2, conv_w, 2 * KD + own, none)
            tl.store(v + (new_row + t)[:, None] * VD + own[None, :], y, mask=is_row[:, None])
            tl.store(
                window + (t + 3).to(tl.int64)[:, None] * CHANNELS + 2 * KD + own[None, :], x, mask=is_verified[:, None]
            )
            tl.store(rec_v + (slot_row + t)[:, None] * VD + own[None, :], y, mask=is_verified[:, None])


@triton.jit
def token(
    q, k, v, g, b, j, fold, old_row, new_row, start, h, key_head, column, d, N_K: tl.constexpr, N_V: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """(key, value, query, log decay, strength) of record or row j; records have no query."""
    at = tl.where(j < fold, old_row, new_row) + j
    row = start.to(tl.int64) + j - fold
    key, value = tl.load(k + (at * N_K + key_head) * DIM + d), tl.load(v + (at * N_V + h) * DIM + column)
    query = tl.load(q + (row * N_K + key_head) * DIM + d, mask=(d >= 0) & (j >= fold), other=0.0)
    return key, value, query, tl.load(g + at * N_V + h), tl.load(b + at * N_V + h)


@kernel
def gdn_rows(
    state, q, k, v, g, b, out, seq_slot, seq_start, seq_fold, seq_keep, fault,
    n_seq, n_slot, width, n_row, chunked, scale,
    N_K: tl.constexpr, N_V: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """Grid (value heads, parts of a head, sequences). Kept sequences of `chunked` rows and more are only folded."""
    h, s = tl.program_id(0), tl.program_id(2)
    column, d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DIM)
    slot, start, n, fold, kept = read_seq(seq_slot, seq_start, seq_fold, seq_keep, s, n_slot, width, n_row, fault, OP)
    if s == n_seq - 1:  # rows behind the last sequence's are nobody's, and read all the same
        for row in range(tl.maximum(tl.load(seq_start + n_seq), 0), n_row):
            tl.store(out + (row.to(tl.int64) * N_V + h) * DIM + column, tl.zeros([COLUMNS], dtype=tl.float32))
    n = tl.where(kept & (n >= chunked), 0, n)
    if n + fold == 0:
        return
    own = state + ((slot.to(tl.int64) * N_V + h) * DIM + column)[:, None] * DIM + d[None, :]
    part = tl.load(own)
    old_row, new_row = s.to(tl.int64) * width, n_seq.to(tl.int64) * width + start - fold
    key_head = h % N_K
    last = fold + n - 1
    key, value, query, log_decay, strength = token(
        q, k, v, g, b, 0, fold, old_row, new_row, start, h, key_head, column, d, N_K, N_V, DIM
    )
    later = tl.minimum(1, last)
    next_key, next_value, next_query, next_decay, next_strength = token(
        q, k, v, g, b, later, fold, old_row, new_row, start, h, key_head, column, d, N_K, N_V, DIM
    )
    for j in range(fold + n):
        if (j == fold) & (fold > 0) & (kept == 0):
            tl.store(own, part)  # a verify's rows never touch it
        later = tl.minimum(j + 2, last)  # on its way while two tokens are multiplied
        later_key, later_value, later_query, later_decay, later_strength = token(
            q, k, v, g, b, later, fold, old_row, new_row, start, h, key_head, column, d, N_K, N_V, DIM
        )
        part = part * tl.exp(log_decay)
        delta = strength * (value - tl.sum(part * key[None, :], 1))
        part = tl.fma(tl.zeros_like(part) + delta[:, None], tl.zeros_like(part) + key[None, :], part)
        y = tl.sum(part * query[None, :], 1) * scale
        row = start.to(tl.int64) + j - fold
        tl.store(out + (row * N_V + h) * DIM + column, y, mask=(column >= 0) & (j >= fold))
        key, value, query, log_decay, strength = next_key, next_value, next_query, next_decay, next_strength
        next_key, next_value, next_query, next_decay, next_strength = (
            later_key,
            later_value,
            later_query,
            later_decay,
            later_strength,
        )
    if kept | (n == 0):
        tl.store(own, part)


@triton.jit
def _diagonal(own, i, j):
    """The inverse of I + A's block [16, 16] at `own`, A being below the diagonal."""
    block = -tl.load(own + i[:, None] * 64 + j[None, :])
    block = tl.where(i[:, None] > j[None, :], block, 0.0)
    for r in range(1, 16):
        row = tl.sum(tl.where(i[:, None] == r, block, 0.0), 0)
        row += tl.sum(row[:, None] * block, 0)
        block = tl.where(i[:, None] == r, row[None, :], block)
    return block + tl.where(i[:, None] == j[None, :], 1.0, 0.0)


@triton.jit
def _below(own, i, j, row: tl.constexpr, column: tl.constexpr):
    """A's block in the given row and column of blocks."""
    return tl.load(own + (row * 16 + i)[:, None] * 64 + column * 16 + j[None, :])


@triton.jit
def _times(a, b, PRECISE: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISE)


@triton.jit
def _rounded(a, b):
    """In one pass of f16, for what no state sees."""
    return tl.dot(a.to(tl.float16), b.to(tl.float16))


@kernel
def gdn_chunk_solve(
    k, v, g, b, square, u, w, seq_start, s, n_old, n,
    N_K: tl.constexpr, N_V: tl.constexpr, DIM: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Grid (value heads, chunks of a sequence): what its 64 rows would write if the state before them were zero (u), and how much of it
    they would find there (w): T (b v) and T (b e^c k), T = (I + A)^-1, A[i, j] = b_i (k_i k_j) e^(c_i - c_j) below the diagonal.

    square [chunk, value head, 2, 64, 64] is room for A and T; u, w [row of the sequence, value head, DIM]
    """
    h, chunk = tl.program_id(0), tl.program_id(1)
    i, d = tl.arange(0, 64), tl.arange(0, DIM)
    t = chunk * 64 + i
    is_row = t < n
    row = n_old.to(tl.int64) + tl.load(seq_start + s) + t
    keys = tl.load(k + (row * N_K + h % N_K)[:, None] * DIM + d[None, :], mask=is_row[:, None], other=0.0)
    strength = tl.load(b + row * N_V + h, mask=is_row, other=0.0)
    sums = tl.cumsum(tl.load(g + row * N_V + h, mask=is_row, other=0.0).to(tl.float64), 0)  # only differences are used
    decay = tl.where(
        i[:, None] > i[None, :], tl.exp(tl.minimum((sums[:, None] - sums[None, :]).to(tl.float32), 0.0)), 0.0
    )
    below = _times(keys, tl.trans(keys), PRECISE) * decay * strength[:, None]
    own = square + (chunk * N_V + h).to(tl.int64) * 8192
    tl.store(own + i[:, None] * 64 + i[None, :], below)
    tl.debug_barrier()
    x, y = tl.arange(0, 16), tl.arange(0, 16)
    t00, t11 = _diagonal(own, x, y), _diagonal(own + 16 * 65, x, y)
    t22, t33 = _diagonal(own + 32 * 65, x, y), _diagonal(own + 48 * 65, x, y)
    a10, a20, a30 = _below(own, x, y, 1, 0), _below(own, x, y, 2, 0), _below(own, x, y, 3, 0)
    a21, a31, a32 = _below(own, x, y, 2, 1), _below(own, x, y, 3, 1), _below(own, x, y, 3, 2)
    t10 = -_times(_times(t11, a10, PRECISE), t00, PRECISE)
    t21 = -_times(_times(t22, a21, PRECISE), t11, PRECISE)
    t32 = -_times(_times(t33, a32, PRECISE), t22, PRECISE)
    t20 = -_times(t22, _times(a20, t00, PRECISE) + _times(a21, t10, PRECISE), PRECISE)
    t31 = -_times(t33, _times(a31, t11, PRECISE) + _times(a32, t21, PRECISE), PRECISE)
    t30 = -_times(t33, _times(a30, t00, PRECISE) + _times(a31, t10, PRECISE) + _times(a32, t20, PRECISE), PRECISE)
    to = own + 4096
    tl.store(to + i[:, None] * 64 + i[None, :], tl.zeros([64, 64], dtype=tl.float32))
    tl.debug_barrier()
    at = to + x[:, None] * 64 + y[None, :]
    tl.store(at, t00)
    tl.store(at + 16 * 64, t10)
    tl.store(at + 16 * 65, t11)
    tl.store(at + 32 * 64, t20)
    tl.store(at + 32 * 64 + 16, t21)
    tl.store(at + 32 * 65, t22)
    tl.store(at + 48 * 64, t30)
    tl.store(at + 48 * 64 + 16, t31)
    tl.store(at + 48 * 64 + 32, t32)
    tl.store(at + 48 * 65, t33)
    tl.debug_barrier()
    inverse = tl.load(to + i[:, None] * 64 + i[None, :])
    place = (t.to(tl.int64) * N_V + h)[:, None] * DIM + d[None, :]
    values = tl.load(v + (row * N_V + h)[:, None] * DIM + d[None, :], mask=is_row[:, None], other=0.0)
    tl.store(u + place, _times(inverse, values * strength[:, None], PRECISE), mask=is_row[:, None])
    tl.store(
        w + place,
        _times(inverse, keys * (strength * tl.exp(sums.to(tl.float32)))[:, None], PRECISE),
        mask=is_row[:, None],
    )


@kernel
def gdn_chunk_state(
    state, q, k, g, u, w, out, seq_slot, seq_start, s, n_old, n, n_slot, scale,
    N_K: tl.constexpr, N_V: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Grid (value heads, parts of a head): the chunks of a sequence one after the other over the state [column, key], which has its
    records folded."""
    h = tl.program_id(0)
    column, i, d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, 64), tl.arange(0, DIM)
    slot, start = tl.load(seq_slot + s), tl.load(seq_start + s)
    if (slot < 0) | (slot >= n_slot):  # gdn_conv has said so
        return
    own = state + ((slot.to(tl.int64) * N_V + h) * DIM + column)[:, None] * DIM + d[None, :]
    part = tl.load(own)
    for first in tl.range(0, n, 64, num_stages=1):
        t = first + i
        is_row = t < n
        row = n_old.to(tl.int64) + start + t
        sums = tl.cumsum(
            tl.load(g + row * N_V + h, mask=is_row, other=0.0).to(tl.float64), 0
        )  # only differences are used
        last = tl.sum(tl.where(i == 63, sums, 0.0), 0)
        keys = tl.load(k + (row * N_K + h % N_K)[:, None] * DIM + d[None, :], mask=is_row[:, None], other=0.0)
        place = (t.to(tl.int64) * N_V + h)[:, None] * DIM
        found = tl.load(w + place + d[None, :], mask=is_row[:, None], other=0.0)
        new = tl.load(u + place + column[None, :], mask=is_row[:, None], other=0.0)
        new -= _times(found, tl.trans(part), PRECISE)
        to_row = (start + t).to(tl.int64)
        queries = tl.load(q + (to_row * N_K + h % N_K)[:, None] * DIM + d[None, :], mask=is_row[:, None], other=0.0)
        decay = tl.where(
            i[:, None] >= i[None, :], tl.exp(tl.minimum((sums[:, None] - sums[None, :]).to(tl.float32), 0.0)), 0.0
        )
        pairs = _rounded(queries, tl.trans(keys)) * decay
        y = _rounded(queries * tl.exp(sums.to(tl.float32))[:, None], tl.trans(part)) + _rounded(pairs, new)
        tl.store(out + (to_row * N_V + h)[:, None] * DIM + column[None, :], y * scale, mask=is_row[:, None])
        left = tl.exp((last - sums).to(tl.float32))
        part = part * tl.exp(last.to(tl.float32)) + _times(tl.trans(new * left[:, None]), keys, PRECISE)
    tl.store(own, part)
