"""The kernel of `short_conv` in Triton. Imported where it is launched only."""

from __future__ import annotations

import triton
import triton.language as tl

from pyspec.cuda.ops.recurrent.triton_kernels import read_seq
from pyspec.cuda.tri_guards import kernel


@triton.jit
def products(
    window, rows, stride, r, fold, n, channel, is_channel, CHANNELS: tl.constexpr, BACK: tl.constexpr
):
    """b * u of rows r [row, channel]; those before the first come from the window behind its fold."""
    is_old = (r < 0)[:, None] & is_channel[None, :]
    is_new = ((r >= 0) & (r < n))[:, None] & is_channel[None, :]
    old = tl.load(
        window + (fold + BACK + r).to(tl.int64)[:, None] * CHANNELS + channel[None, :],
        mask=is_old,
        other=0.0,
    )
    at = rows + r.to(tl.int64)[:, None] * stride + channel[None, :]
    b, u = tl.load(at, mask=is_new, other=0.0), tl.load(at + 2 * CHANNELS, mask=is_new, other=0.0)
    return tl.where(is_old, old, b * u)


@kernel
def short_conv_rows(
    m, w, conv, out, seq_slot, seq_start, seq_fold, seq_keep, fault,
    m_stride, n_seq, n_slot, width, n_row,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SOME_TAPS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, sequences, stretches of rows). The first stretch moves the window; it has all rows of a verify."""
    BACK: tl.constexpr = TAPS - 1
    s, z = tl.program_id(1), tl.program_id(2)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < CHANNELS
    slot, start, n, fold, kept, first = read_seq(
        seq_slot, seq_start, seq_fold, seq_keep, s, n_slot, width, n_row, fault, OP
    )
    # Rows behind the last sequence belong to none, but are read all the same
    if (s == n_seq - 1) & (z == 0):
        for row in range(tl.maximum(tl.load(seq_start + n_seq), 0), n_row):
            tl.store(
                out + row.to(tl.int64) * CHANNELS + channel,
                tl.zeros([BLOCK], dtype=tl.float32),
                mask=is_channel,
            )
    if (n + fold == 0) | ((z > 0) & (kept == 0)):
        return
    window = conv + slot.to(tl.int64) * (width + BACK) * CHANNELS
    rows = m + start.to(tl.int64) * m_stride
    i = tl.arange(0, SOME_TAPS)
    # row i of the moved window is raw row i - BACK, behind the rows if they are kept
    moved = products(
        window,
        rows,
        m_stride,
        i - BACK + tl.where(kept, n, 0),
        fold,
        n,
        channel,
        is_channel,
        CHANNELS,
        BACK,
    )
    step = tl.where(kept, tl.num_programs(2), 1) * ROWS
    # rows that look into the window come before it moves
    for t0 in range(z * ROWS, n, step):
        r = t0 + tl.arange(0, ROWS)
        is_row = (r < n)[:, None] & is_channel[None, :]
        y = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for j in tl.static_range(TAPS):
            x = products(
                window, rows, m_stride, r + (j - BACK), fold, n, channel, is_channel, CHANNELS, BACK
            )
            tap = tl.load(w + channel * TAPS + j, mask=is_channel, other=0.0)
            y = tl.fma(x, tl.zeros_like(x) + tap[None, :], y)
        c = tl.load(
            rows + r.to(tl.int64)[:, None] * m_stride + CHANNELS + channel[None, :],
            mask=is_row,
            other=0.0,
        )
        tl.store(
            out + (start + r).to(tl.int64)[:, None] * CHANNELS + channel[None, :], c * y, mask=is_row
        )
    tl.debug_barrier()
    if kept == 0:
        for t0 in range(0, n, ROWS):
            r = t0 + tl.arange(0, ROWS)
            x = products(window, rows, m_stride, r, 0, n, channel, is_channel, CHANNELS, BACK)
            at = window + (BACK + first + r).to(tl.int64)[:, None] * CHANNELS + channel[None, :]
            tl.store(at, x, mask=(r < n)[:, None] & is_channel[None, :])
    if z == 0:
        tl.store(
            window + i[:, None] * CHANNELS + channel[None, :],
            moved,
            mask=(i < BACK)[:, None] & is_channel[None, :] & (first == 0),
        )
