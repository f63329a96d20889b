"""What Triton kernels of several ops share. Imported by kernels only, which are imported where they are launched: it needs Triton."""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl

VARYING = [
    "chunked", "n", "n_col", "n_key", "n_next", "n_old", "n_page", "n_pair", "n_prog", "n_row", "n_rows", "n_seq", "n_shared", "n_slot", "n_some",
    "n_split", "n_draft", "n_part", "n_token", "n_vocab", "seq_step", "draft_step", "s", "width", "window",
]  # fmt: skip
"""Arguments whose value no kernel is compiled anew for, while it serves."""

kernel = partial(triton.jit, do_not_specialize=VARYING)
"""What is launched; what is called by kernels is `triton.jit`."""


@triton.jit
def wait_for_predecessor():
    """What the kernel before writes may be touched from here on, and what it reads be written: include/overlap.cuh."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def let_successor_start():
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def take_turn(OVERLAP: tl.constexpr):
    """At the begin of a kernel that may be launched to overlap."""
    if OVERLAP:
        wait_for_predecessor()
        let_successor_start()


@triton.jit
def fetch_ahead(start, n_byte, MOST: tl.constexpr):
    """n_byte bytes, or MOST, are brought nearer: to L2."""
    at = tl.minimum(tl.arange(0, MOST // 128) * 128, n_byte - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [(start + at).to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def report(fault, op, place, index, limit):
    """The first index that left its bounds, as in include/bounds.cuh."""
    if tl.atomic_cas(fault, 0, 1) == 0:
        tl.store(fault + 1, op)
        tl.store(fault + 2, place)
        tl.store(fault + 3, index)
        tl.store(fault + 4, limit)
