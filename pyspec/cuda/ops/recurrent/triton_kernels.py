"""Shared by the Triton kernels of recurrent layers: the metadata of a batch, the convolution with its window."""

from __future__ import annotations

import triton
import triton.language as tl

from pyspec.cuda.tri_guards import report

KEEP, FOLD_ONLY, LATE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # in seq_keep, see seq.cuh


@triton.jit
def read_seq(seq_slot, seq_start, seq_fold, seq_keep, s, n_slot, width, n_row, fault, OP: tl.constexpr):
    """(slot, first row, rows, records to fold, kept, records before those of its rows). A bad index is reported, and its sequence has no rows and no records: clamping
    it to a real slot would spoil that slot's state."""
    slot, start, fold = tl.load(seq_slot + s), tl.load(seq_start + s), tl.load(seq_fold + s)
    n, keep = tl.load(seq_start + s + 1) - start, tl.load(seq_keep + s)
    folds_only = (n == 0) & (keep == FOLD_ONLY)
    is_there = (n > 0) | folds_only
    last = start + n - 1
    first = tl.where((keep == LATE) & (fold > 0), fold, 0)
    index, limit = 0, 0
    if is_there:
        if (keep != KEEP) & (first + n > width):
            index, limit = first + n, width + 1
        if (n > 0) & ((last < 0) | (last >= n_row)):
            index, limit = last, n_row
        if (n > 0) & ((start < 0) | (start >= n_row)):
            index, limit = start, n_row
        if (fold < 0) | (fold > width):
            index, limit = fold, width + 1
        if (slot < 0) | (slot >= n_slot):
            index, limit = slot, n_slot
        if limit > 0:
            report(fault, OP, slot, index, limit)
    is_good = is_there & (limit == 0)
    n, fold = tl.where(is_good, n, 0), tl.where(is_good, fold, 0)
    first = tl.where(is_good, first, 0)
    return tl.where(is_good, slot, 0), start, n, fold, keep == KEEP, first


@triton.jit
def softplus(x):
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e  # log(1 + e), corrected for the rounding of the sum
    return tl.where(x > 20.0, x, tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0))))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def window_of(conv, fold, channel, N_CHANNEL: tl.constexpr):
    """The three raw inputs before the rows. conv: the slot's."""
    at = conv + fold.to(tl.int64) * N_CHANNEL + channel
    return tl.load(at), tl.load(at + N_CHANNEL), tl.load(at + 2 * N_CHANNEL)


@triton.jit
def raw_rows(rows, stride, r, n, w0, w1, w2, channel):
    """[row, channel] of raw inputs r, those before the first from the window. rows: the sequence's first."""
    x = tl.load(
        rows + r.to(tl.int64)[:, None] * stride + channel[None, :],
        mask=((r >= 0) & (r < n))[:, None],
        other=0.0,
    )
    before = tl.where(
        (r == -3)[:, None], w0[None, :], tl.where((r == -2)[:, None], w1[None, :], w2[None, :])
    )
    return tl.where((r < 0)[:, None], before, x)


@triton.jit
def convolved(rows, stride, t, n, w0, w1, w2, conv_w, channel, y):
    """(silu of the convolution, raw inputs) of rows t [row, channel]; y [channel] is the bias."""
    taps = conv_w + channel * 4
    sums = tl.zeros([t.shape[0], channel.shape[0]], dtype=tl.float32) + y[None, :]
    for i in tl.static_range(3):
        x = raw_rows(rows, stride, t + (i - 3), n, w0, w1, w2, channel)
        sums = tl.fma(x, tl.zeros_like(x) + tl.load(taps + i)[None, :], sums)
    x = raw_rows(rows, stride, t, n, w0, w1, w2, channel)
    sums = tl.fma(x, tl.zeros_like(x) + tl.load(taps + 3)[None, :], sums)
    return sums * sigmoid(sums), x


@triton.jit
def moved_window(conv, fold, rows, stride, n, kept, channel, N_CHANNEL: tl.constexpr):
    """[4, channel]: the window after the fold, or after the rows if they are kept; the fourth is garbage."""
    i = tl.arange(0, 4)
    at = tl.where(kept, n, 0) + i  # of window and rows, one after the other
    is_old = (at < 3) & (i < 3)
    old = tl.load(
        conv + (fold + at).to(tl.int64)[:, None] * N_CHANNEL + channel[None, :],
        mask=is_old[:, None],
        other=0.0,
    )
    is_new = (at >= 3) & (i < 3)
    new = tl.load(
        rows + (at - 3).to(tl.int64)[:, None] * stride + channel[None, :],
        mask=is_new[:, None],
        other=0.0,
    )
    return tl.where(is_old[:, None], old, new)


@triton.jit
def put_window(conv, window, channel, first, N_CHANNEL: tl.constexpr):
    """Store the window, unless rows are recorded behind others, because the window must not move past those."""
    i = tl.arange(0, 4)
    tl.store(
        conv + i[:, None] * N_CHANNEL + channel[None, :], window, mask=(i < 3)[:, None] & (first == 0)
    )


@triton.jit
def copied(
    record, to, slot_row, old_row, fold, channel, is_channel, STRIDE: tl.constexpr, ROWS: tl.constexpr
):
    """Records to be folded, to where this batch's may not overwrite them."""
    for t0 in range(0, fold, ROWS):
        t = t0 + tl.arange(0, ROWS)
        is_row = (t < fold)[:, None] & is_channel[None, :]
        x = tl.load(record + (slot_row + t)[:, None] * STRIDE + channel[None, :], mask=is_row, other=0.0)
        tl.store(to + (old_row + t)[:, None] * STRIDE + channel[None, :], x, mask=is_row)
