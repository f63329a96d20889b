"""The kernel of `hadamard` in Triton. Imported where it is launched only."""

from __future__ import annotations

import triton
import triton.language as tl

from pyspec.cuda.tri_guards import kernel


@triton.jit
def turned(x, N: tl.constexpr, FACTOR: tl.constexpr):
    """x [N], whose pairs are summed as in slots/kv_codes.py."""
    far: tl.constexpr = 1
    d = tl.arange(0, N)
    while far < N:
        other = tl.gather(x, d ^ far, 0)
        x = tl.where((d & far) != 0, other - x, x + other)
        far *= 2
    return x * FACTOR


@kernel
def hadamard(x, out, N: tl.constexpr, FACTOR: tl.constexpr):
    """Grid (pieces of N dims)."""
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    tl.store(out + at, turned(tl.load(x + at), N, FACTOR))
