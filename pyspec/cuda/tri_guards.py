"""Shared by Triton kernels of several ops. It needs Triton, so only kernels import it, and a launch imports those."""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl

VARYING = [
    "chunked", "first_tile", "n", "n_col", "n_key", "n_next", "n_old", "n_page", "n_pair", "n_prog", "n_row", "n_rows", "n_seq", "n_shared", "n_slot", "n_some",
    "n_split", "n_draft", "n_part", "n_tile", "n_token", "n_vocab", "seq_step", "draft_step", "s", "width", "window",
]  # fmt: skip
"""Arguments whose value no kernel is compiled anew for, while it serves."""

kernel = partial(triton.jit, do_not_specialize=VARYING)
"""Decorator of launched kernels; functions that kernels call are `triton.jit`."""


@triton.jit
def report(fault, op, place, index, limit):
    """The first index that left its bounds, as in include/bounds.cuh."""
    if tl.atomic_cas(fault, 0, 1) == 0:
        tl.store(fault + 1, op)
        tl.store(fault + 2, place)
        tl.store(fault + 3, index)
        tl.store(fault + 4, limit)
