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

# N_D is the number of decays of a head: one, or one for each dimension of its keys. Log decays are not below FLOOR if that is not 0.
# Buffers of rows and records: [sequences * width + rows, ...]; records of sequence s from s * width on.


@kernel
def gdn_conv(
    m, alpha, beta, a, dt_bias, conv_w, conv, rec_k, rec_v, rec_g, rec_b, q, k, v, g, b,
    seq_slot, seq_start, seq_fold, seq_keep, fault,
    m_stride, alpha_stride, beta_stride, n_seq, n_slot, width, n_row, eps,
    N_K: tl.constexpr, N_V: tl.constexpr, DIM: tl.constexpr, N_D: tl.constexpr, FLOOR: tl.constexpr, ROWS: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """Grid (key heads + value heads, sequences, stretches of rows)."""
    KD: tl.constexpr = N_K * DIM
    VD: tl.constexpr = N_V * DIM
    CHANNELS: tl.constexpr = 2 * KD + VD
    unit, s, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, start, n, fold, kept, first = read_seq(
        seq_slot, seq_start, seq_fold, seq_keep, s, n_slot, width, n_row, fault, OP
    )
    if n + fold == 0:
        return
    d, one = tl.arange(0, DIM), tl.arange(0, 1)
    none = tl.zeros([DIM], dtype=tl.float32)
    slot_row, old_row = slot.to(tl.int64) * width, s.to(tl.int64) * width
    new_row, record_row = n_seq.to(tl.int64) * width + start, slot_row + first
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
            put_window(window, q_moved, own, first, CHANNELS)
            put_window(window, k_moved, KD + own, first, CHANNELS)
        for t0 in range(z * ROWS, n, tl.num_programs(2) * ROWS):
            t = t0 + tl.arange(0, ROWS)
            is_row = (t < n)[:, None]
            y, x = convolved(rows, m_stride, t, n, q0, q1, q2, conv_w, own, none)
            y = y * tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
            tl.store(q + (start + t).to(tl.int64)[:, None] * KD + own[None, :], y, mask=is_row)
            is_verified = is_row & (kept == 0)
            at = window + (first + t + 3).to(tl.int64)[:, None] * CHANNELS + own[None, :]
            tl.store(at, x, mask=is_verified)
            y, x = convolved(rows, m_stride, t, n, k0, k1, k2, conv_w, KD + own, none)
            y = y * tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
            tl.store(k + (new_row + t)[:, None] * KD + own[None, :], y, mask=is_row)
            tl.store(at + KD, x, mask=is_verified)
            tl.store(rec_k + (record_row + t)[:, None] * KD + own[None, :], y, mask=is_verified)
    else:
        head = unit - N_K
        own = head * DIM + d
        decays = head * N_D + tl.arange(0, N_D)
        v0, v1, v2 = window_of(window, fold, 2 * KD + own, CHANNELS)
        if z == 0:
            copied(rec_v, v, slot_row, old_row, fold, own, d >= 0, VD, ROWS)
            copied(rec_g, g, slot_row, old_row, fold, decays, decays >= 0, N_V * N_D, ROWS)
            copied(rec_b, b, slot_row, old_row, fold, head + one, one == 0, N_V, ROWS)
            moved = moved_window(window, fold, rows, m_stride, n, kept, 2 * KD + own, CHANNELS)
            tl.debug_barrier()
            put_window(window, moved, 2 * KD + own, first, CHANNELS)
        # a program that only folds gets no weights
        slope, bias = (
            tl.load(a + head, mask=n > 0, other=0.0),
            tl.load(dt_bias + decays, mask=(decays >= 0) & (n > 0), other=0.0),
        )
        for t0 in range(z * ROWS, n, tl.num_programs(2) * ROWS):
            t = t0 + tl.arange(0, ROWS)
            is_row = t < n
            is_verified = is_row & (kept == 0)
            row = (start + t).to(tl.int64)
            at = row[:, None] * alpha_stride + decays[None, :]
            raw = tl.load(alpha + at, mask=is_row[:, None], other=0.0) + bias[None, :]
            decay = FLOOR * sigmoid(slope * raw) if FLOOR != 0.0 else slope * softplus(raw)
            strength = sigmoid(tl.load(beta + row * beta_stride + head, mask=is_row, other=0.0))
            at = (new_row + t)[:, None] * (N_V * N_D) + decays[None, :]
            tl.store(g + at, decay, mask=is_row[:, None])
            tl.store(b + (new_row + t) * N_V + head, strength, mask=is_row)
            at = (record_row + t)[:, None] * (N_V * N_D) + decays[None, :]
            tl.store(rec_g + at, decay, mask=is_verified[:, None])
            tl.store(rec_b + (record_row + t) * N_V + head, strength, mask=is_verified)
            y, x = convolved(rows, m_stride, t, n, v0, v1, v2, conv_w, 2 * KD + own, none)
            tl.store(v + (new_row + t)[:, None] * VD + own[None, :], y, mask=is_row[:, None])
            tl.store(
                window + (first + t + 3).to(tl.int64)[:, None] * CHANNELS + 2 * KD + own[None, :],
                x,
                mask=is_verified[:, None],
            )
            tl.store(rec_v + (record_row + t)[:, None] * VD + own[None, :], y, mask=is_verified[:, None])


@triton.jit
def token(given, place, j, N_K: tl.constexpr, N_V: tl.constexpr, DIM: tl.constexpr, N_D: tl.constexpr):
    """(key, value, query, log decays, strength) of record or row j; records have no query."""
    q, k, v, g, b = given
    fold, old_row, new_row, start, h, key_head, column, d = place
    at = tl.where(j < fold, old_row, new_row) + j
    row = start.to(tl.int64) + j - fold
    key, value = tl.load(k + (at * N_K + key_head) * DIM + d), tl.load(v + (at * N_V + h) * DIM + column)
    query = tl.load(q + (row * N_K + key_head) * DIM + d, mask=(d >= 0) & (j >= fold), other=0.0)
    decays = tl.load(g + (at * N_V + h) * N_D + tl.arange(0, N_D))
    return key, value, query, decays, tl.load(b + at * N_V + h)


@kernel
def gdn_rows(
    state, q, k, v, g, b, out, seq_slot, seq_start, seq_fold, seq_keep, fault,
    n_seq, n_slot, width, n_row, scale,
    N_K: tl.constexpr, N_V: tl.constexpr, DIM: tl.constexpr, N_D: tl.constexpr, COLUMNS: tl.constexpr, OP: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Grid (value heads, parts of a head, sequences)."""
    h, s = tl.program_id(0), tl.program_id(2)
    column, d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DIM)
    slot, start, n, fold, kept, first = read_seq(
        seq_slot, seq_start, seq_fold, seq_keep, s, n_slot, width, n_row, fault, OP
    )
    if s == n_seq - 1:  # rows behind the last sequence belong to none, but are read all the same
        for row in range(tl.maximum(tl.load(seq_start + n_seq), 0), n_row):
            tl.store(
                out + (row.to(tl.int64) * N_V + h) * DIM + column, tl.zeros([COLUMNS], dtype=tl.float32)
            )
    if n + fold == 0:
        return
    own = state + ((slot.to(tl.int64) * N_V + h) * DIM + column)[:, None] * DIM + d[None, :]
    part = tl.load(own)
    old_row, new_row = s.to(tl.int64) * width, n_seq.to(tl.int64) * width + start - fold
    key_head = h // (N_V // N_K) if GROUPED else h % N_K
    last = fold + n - 1
    given, place = (q, k, v, g, b), (fold, old_row, new_row, start, h, key_head, column, d)
    now = token(given, place, 0, N_K, N_V, DIM, N_D)
    soon = token(given, place, tl.minimum(1, last), N_K, N_V, DIM, N_D)
    for j in range(fold + n):
        if (j == fold) & (fold > 0) & (kept == 0) & (first == 0):
            tl.store(own, part)  # a verify's rows never touch it
        # On its way while two tokens are multiplied
        later = token(given, place, tl.minimum(j + 2, last), N_K, N_V, DIM, N_D)
        key, value, query, log_decay, strength = now
        part = part * tl.exp(log_decay)[None, :]
        delta = strength * (value - tl.sum(part * key[None, :], 1))
        part = tl.fma(tl.zeros_like(part) + delta[:, None], tl.zeros_like(part) + key[None, :], part)
        y = tl.sum(part * query[None, :], 1) * scale
        row = start.to(tl.int64) + j - fold
        tl.store(out + (row * N_V + h) * DIM + column, y, mask=(column >= 0) & (j >= fold))
        now, soon = soon, later
    if kept | (n == 0):
        tl.store(own, part)
