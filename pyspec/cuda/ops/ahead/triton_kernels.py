"""The kernels of `ahead` in Triton. Imported where they are launched only. Rows of no sequence (padding) stay as they are."""

from __future__ import annotations

import triton.language as tl

from pyspec.cuda.tri_guards import kernel, report

NO_TOKEN = tl.constexpr(-1)


@kernel
def ahead_accept(
    best, tokens, starts, ends, forced, n, following, last, goes, n_row,
    HAS_ENDS: tl.constexpr, HAS_FORCED: tl.constexpr, N_END: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (sequences): how many rows of each are kept, as ref.Kept."""
    s, k = tl.program_id(0), tl.arange(0, N_END)
    start = tl.minimum(tl.maximum(tl.load(starts + s), 0), n_row)
    end = tl.minimum(tl.maximum(tl.load(starts + s + 1), start), n_row)
    n_right = 0
    goes_on = 1
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row, has_draft = row < end, row + 1 < end
        draft = tl.load(tokens + row + 1, mask=has_draft, other=NO_TOKEN)
        found = tl.load(best + row, mask=is_row, other=0.0).to(tl.int64)
        if HAS_FORCED:
            right = has_draft & (row - start < tl.load(forced + s))
        else:
            right = has_draft & (draft == found)
        if HAS_ENDS:
            stop = tl.load(ends + s * N_END + k)
            right = right & (tl.max((stop[None, :] == draft[:, None]).to(tl.int32), 1) == 0)
        count = tl.min(tl.where(right, ROWS, tl.arange(0, ROWS)), 0)  # from the first row on
        count = tl.where(goes_on != 0, count, 0)
        tl.store(following + row, tl.where(row - first < count, draft, found), mask=is_row)
        n_right += count
        goes_on = tl.where(count == ROWS, goes_on, 0)
    row = tl.maximum(tl.minimum(start + n_right, n_row - 1), 0)
    tl.store(n + s, n_right + 1)
    tl.store(last + s, row.to(tl.int64))
    on = 1
    if HAS_ENDS:
        on = 1 - tl.max(
            (tl.load(ends + s * N_END + k) == tl.load(best + row).to(tl.int64)).to(tl.int32), 0
        )
    tl.store(goes + s, on)


@kernel
def ahead_move(
    tokens, positions, rope_at, kv_rows, hi, out_rows, fold, keep, starts, row_seq, page_table, n, following, last, goes, drafts, fault,
    seq_step, draft_step, n_draft, n_row, n_seq, n_next, n_page,
    PAGE: tl.constexpr, MOVES: tl.constexpr, HAS_KEPT: tl.constexpr, HAS_DRAFTS: tl.constexpr, ROWS: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """Grid (rows / ROWS). MOVES: rows move by n [seq], or by 1 without HAS_KEPT; else each gets the token after the verify's row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    s = tl.load(row_seq + row, mask=row < n_row, other=-1)
    is_row = (s >= 0) & (s < n_seq)
    place = row - tl.load(starts + s, mask=is_row, other=0)
    is_first = is_row & (place == 0)
    if not MOVES:
        tl.store(
            tokens + row,
            tl.load(following + row, mask=is_row & (row < n_next), other=0),
            mask=is_row & (row < n_next),
        )
        tl.store(out_rows + s, tl.load(last + s, mask=is_first, other=0), mask=is_first)
        return
    by = tl.zeros([ROWS], dtype=tl.int32) + 1
    if HAS_KEPT:
        by = tl.load(n + s, mask=is_row, other=0)
    position = tl.load(positions + row, mask=is_row, other=0) + by
    page = position // PAGE
    is_page = (page >= 0) & (page < n_page)
    bad = tl.where(is_row & (is_page == 0), row, 0x7FFFFFFF)
    first_bad = tl.min(bad, 0)
    if first_bad < 0x7FFFFFFF:
        whose = tl.max(tl.where(row == first_bad, s, -1), 0)
        index = tl.max(tl.where(row == first_bad, page, -1), 0)
        report(fault, OP, whose, tl.where(index > 0x7FFFFFFF, -1, index).to(tl.int32), n_page)
    tl.store(positions + row, position, mask=is_row)
    tl.store(rope_at + row, tl.load(rope_at + row, mask=is_row, other=0) + by, mask=is_row)
    tl.store(hi + row, tl.load(hi + row, mask=is_row, other=0) + by, mask=is_row)
    own = tl.load(
        page_table + s.to(tl.int64) * n_page + tl.where(is_page, page, 0), mask=is_row, other=0
    )
    tl.store(kv_rows + row, own * PAGE + position % PAGE, mask=is_row)
    if HAS_KEPT:
        row_before = tl.load(last + s, mask=is_first, other=0)
        tl.store(tokens + row, tl.load(following + row_before, mask=is_first, other=0), mask=is_first)
        tl.store(fold + s, tl.load(fold + s, mask=is_first, other=0) * by, mask=is_first)
        on = tl.load(goes + s, mask=is_first, other=0)
        kept = tl.load(keep + s, mask=is_first, other=0)
        tl.store(keep + s, tl.where(kept == 1, on, kept), mask=is_first)
        if HAS_DRAFTS:
            is_draft = is_row & (place > 0)
            at = s.to(tl.int64) * seq_step + tl.minimum(place - 1, n_draft - 1).to(tl.int64) * draft_step
            tl.store(tokens + row, tl.load(drafts + at, mask=is_draft, other=0), mask=is_draft)
