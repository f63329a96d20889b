"""The kernel of `norms` in Triton. Imported where it is launched only."""

from __future__ import annotations

import triton.language as tl

from pyspec.cuda.tri_guards import kernel, report


@kernel
def norms(
    x, weight, out, other, other_weight, other_out, rows, stream, fault, x_step, other_step, step, n_row, eps, factor,
    COLUMNS: tl.constexpr, WIDE: tl.constexpr, LAYER: tl.constexpr, PICKS: tl.constexpr, ADDS: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """Grid (rows of out, then of other_out), which lie `step` apart, those of x and other `x_step` and `other_step`. PICKS: `rows` says which
    of the other input's. ADDS: `stream` is added to the rows of out, which `factor` then multiplies."""
    program = tl.program_id(0)
    column = tl.arange(0, WIDE)
    is_column, is_first = column < COLUMNS, program < n_row
    to = tl.where(is_first, program, program - n_row).to(tl.int64)
    own = to
    if PICKS:  # noqa: SIM102 - known when it is compiled
        if program >= n_row:
            own = tl.load(rows + to)
            if (own < 0) | (own >= n_row):  # whose it is only the batch's layout knew
                report(
                    fault, OP, -1, tl.where((own < 0) | (own > 0x7FFFFFFF), -1, own).to(tl.int32), n_row
                )
                own = own * 0
    if is_first:
        y = tl.load(x + own * x_step + column, mask=is_column, other=0.0)
        w = tl.load(weight + column, mask=is_column, other=0.0)
    else:
        y = tl.load(other + own * other_step + column, mask=is_column, other=0.0)
        w = tl.load(other_weight + column, mask=is_column, other=0.0)
    if LAYER:
        y = tl.where(is_column, y - tl.sum(y, 0) / COLUMNS, 0.0)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / COLUMNS + eps) * w
    if ADDS:
        y = (tl.load(stream + own * COLUMNS + column, mask=is_column, other=0.0) + y) * factor
    if is_first:
        tl.store(out + to * step + column, y, mask=is_column)
    else:
        tl.store(other_out + to * step + column, y, mask=is_column)
