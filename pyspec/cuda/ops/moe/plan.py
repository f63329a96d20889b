"""Buffers that `moe` keeps, for a planner before a load."""

from __future__ import annotations

from pyspec.cuda.ops.moe.builds import HALVED_UNIT
from pyspec.cuda.ops.moe.cuda import rows_at_once


def buffer_bytes(n_used: int, n_expert: int, n_in: int, n_ff: int) -> int:
    """Of rows on their way into the gates and ups, and into the downs, of the types that take most."""
    of_inner, of_row = (-(-n // 256) * (4 * HALVED_UNIT + 64) for n in (n_ff, n_in))
    return rows_at_once(n_used, n_expert) * (n_used * of_inner + of_row)
