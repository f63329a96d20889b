"""The kernels of `mamba2` in Triton, in two launches a layer as mamba2.cu. Imported where they are launched only.

mamba2_conv  a program some channels, the last one the gates: accepted records to a buffer, the window moved, rows through conv and
             silu, to records, too, if they are a verify's.
mamba2_rows  a program some of a head's rows of the state: records, then rows, one loop over both. So a state does not depend on
             how its tokens came.
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
    softplus,
    window_of,
)
from pyspec.cuda.tri_guards import kernel

# Buffers of rows and records: [sequences * width + rows, ...]; records of sequence s from s * width on.


@kernel
def mamba2_conv(
    m, dt, a, dt_bias, conv_w, conv_b, conv, rec_x, rec_b, rec_e, rec_t, x, b, c, e, t,
    seq_slot, seq_start, seq_fold, seq_keep, fault,
    m_stride, dt_stride, n_seq, n_slot, width, n_row,
    HEADS: tl.constexpr, SOME_HEADS: tl.constexpr, INNER: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    OP: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels + 1, sequences, stretches of rows)."""
    CHANNELS: tl.constexpr = INNER + 2 * WIDE
    unit, s, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, start, n, fold, kept, first = read_seq(
        seq_slot, seq_start, seq_fold, seq_keep, s, n_slot, width, n_row, fault, OP
    )
    if n + fold == 0:
        return
    slot_row, old_row = slot.to(tl.int64) * width, s.to(tl.int64) * width
    new_row, record_row = n_seq.to(tl.int64) * width + start, slot_row + first
    step = tl.num_programs(2) * ROWS
    if unit == CHANNELS // BLOCK:
        head = tl.arange(0, SOME_HEADS)
        is_head = head < HEADS
        if z == 0:
            copied(rec_e, e, slot_row, old_row, fold, head, is_head, HEADS, ROWS)
            copied(rec_t, t, slot_row, old_row, fold, head, is_head, HEADS, ROWS)
            tl.debug_barrier()  # everything old is read
        is_known = is_head & (n > 0)  # a program that only folds gets no weights
        slope, bias = (
            tl.load(a + head, mask=is_known, other=0.0),
            tl.load(dt_bias + head, mask=is_known, other=0.0),
        )
        for t0 in range(z * ROWS, n, step):
            r = t0 + tl.arange(0, ROWS)
            is_row = (r < n)[:, None] & is_head[None, :]
            is_verified = is_row & (kept == 0)
            raw = tl.load(
                dt + (start + r).to(tl.int64)[:, None] * dt_stride + head[None, :],
                mask=is_row,
                other=0.0,
            )
            size = softplus(raw + bias[None, :])
            decay = tl.exp(size * slope[None, :])
            new, record = (
                (new_row + r)[:, None] * HEADS + head[None, :],
                (record_row + r)[:, None] * HEADS + head[None, :],
            )
            tl.store(t + new, size, mask=is_row)
            tl.store(e + new, decay, mask=is_row)
            tl.store(rec_t + record, size, mask=is_verified)
            tl.store(rec_e + record, decay, mask=is_verified)
        return
    channel = unit * BLOCK + tl.arange(0, BLOCK)
    every = channel >= 0
    window = conv + slot.to(tl.int64) * (width + 3) * CHANNELS
    rows = m + start.to(tl.int64) * m_stride
    w0, w1, w2 = window_of(window, fold, channel, CHANNELS)
    if z == 0:
        if unit * BLOCK < INNER:
            copied(rec_x, x, slot_row, old_row, fold, channel, every, INNER, ROWS)
        elif unit * BLOCK < INNER + WIDE:
            copied(rec_b, b, slot_row, old_row, fold, channel - INNER, every, WIDE, ROWS)
        moved = moved_window(window, fold, rows, m_stride, n, kept, channel, CHANNELS)
        tl.debug_barrier()
        put_window(window, moved, channel, first, CHANNELS)
    bias = tl.load(conv_b + channel, mask=every & (n > 0), other=0.0)
    for t0 in range(z * ROWS, n, step):
        r = t0 + tl.arange(0, ROWS)
        is_row = (r < n)[:, None]
        is_verified = is_row & (kept == 0)
        y, raw = convolved(rows, m_stride, r, n, w0, w1, w2, conv_w, channel, bias)
        tl.store(
            window + (first + r + 3).to(tl.int64)[:, None] * CHANNELS + channel[None, :],
            raw,
            mask=is_verified,
        )
        new, record = (new_row + r)[:, None], (record_row + r)[:, None]
        if unit * BLOCK < INNER:
            tl.store(x + new * INNER + channel[None, :], y, mask=is_row)
            tl.store(rec_x + record * INNER + channel[None, :], y, mask=is_verified)
        elif unit * BLOCK < INNER + WIDE:
            tl.store(b + new * WIDE + (channel - INNER)[None, :], y, mask=is_row)
            tl.store(rec_b + record * WIDE + (channel - INNER)[None, :], y, mask=is_verified)
        else:
            tl.store(
                c + (start + r).to(tl.int64)[:, None] * WIDE + (channel - INNER - WIDE)[None, :],
                y,
                mask=is_row,
            )


@triton.jit
def token(
    given, place, j, HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, N_STATE: tl.constexpr
):
    """(x, B, C, decay, step) of record or row j; records have no C."""
    x, b, c, e, t = given
    fold, old_row, new_row, start, h, group, i, at_state = place
    at = tl.where(j < fold, old_row, new_row) + j
    row = start.to(tl.int64) + j - fold
    xs, bs = (
        tl.load(x + (at * HEADS + h) * DIM + i),
        tl.load(b + (at * GROUPS + group) * N_STATE + at_state),
    )
    cs = tl.load(
        c + (row * GROUPS + group) * N_STATE + at_state, mask=(at_state >= 0) & (j >= fold), other=0.0
    )
    return xs, bs, cs, tl.load(e + at * HEADS + h), tl.load(t + at * HEADS + h)


@kernel
def mamba2_rows(
    state, d, x, b, c, e, t, out, seq_slot, seq_start, seq_fold, seq_keep, fault,
    n_seq, n_slot, width, n_row,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, N_STATE: tl.constexpr, PART: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """Grid (heads, parts of a head, sequences)."""
    h, s = tl.program_id(0), tl.program_id(2)
    group = h // (HEADS // GROUPS)
    i, at_state = tl.program_id(1) * PART + tl.arange(0, PART), tl.arange(0, N_STATE)
    slot, start, n, fold, kept, first = read_seq(
        seq_slot, seq_start, seq_fold, seq_keep, s, n_slot, width, n_row, fault, OP
    )
    if s == n_seq - 1:  # rows behind the last sequence belong to none, but are read all the same
        for row in range(tl.maximum(tl.load(seq_start + n_seq), 0), n_row):
            tl.store(out + (row.to(tl.int64) * HEADS + h) * DIM + i, tl.zeros([PART], dtype=tl.float32))
    if n + fold == 0:
        return
    own = state + ((slot.to(tl.int64) * HEADS + h) * DIM + i)[:, None] * N_STATE + at_state[None, :]
    part = tl.load(own)
    weight = tl.load(d + h, mask=n > 0, other=0.0)
    old_row, new_row = s.to(tl.int64) * width, n_seq.to(tl.int64) * width + start - fold
    last = fold + n - 1
    given, place = (x, b, c, e, t), (fold, old_row, new_row, start, h, group, i, at_state)
    now = token(given, place, 0, HEADS, GROUPS, DIM, N_STATE)
    soon = token(given, place, tl.minimum(1, last), HEADS, GROUPS, DIM, N_STATE)
    for j in range(fold + n):
        if (j == fold) & (fold > 0) & (kept == 0) & (first == 0):
            tl.store(own, part)  # a verify's rows never touch it
        # On its way while two tokens are multiplied
        later = token(given, place, tl.minimum(j + 2, last), HEADS, GROUPS, DIM, N_STATE)
        xs, bs, cs, decay, size = now
        none = tl.zeros_like(part)
        part = tl.fma(none + (size * xs)[:, None], none + bs[None, :], part * decay)
        y = tl.sum(part * cs[None, :], 1) + weight * xs
        row = start.to(tl.int64) + j - fold
        tl.store(out + (row * HEADS + h) * DIM + i, y, mask=(i >= 0) & (j >= fold))
        now, soon = soon, later
    if kept | (n == 0):
        tl.store(own, part)
