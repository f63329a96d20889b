"""What `attend` in Triton has of its own where one key head's keys are its values, too: limits, and builds of its kernel.

Rounding is attend_triton's: q and weights to f16, of bf16 pools to bf16, of f32 pools not at all.
"""

from __future__ import annotations

from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.cuda.ops.attend.shared import AttendTiles

MOST_DIM = 1024


def shape_limits(spec: AttendSpec) -> str | None:
    """Why the kernel does not take such heads; None if it does."""
    if spec.n_kv_head != 1 or spec.has_sinks or spec.cap:
        return "keys that are values have one head, no sinks and no cap in this kernel"
    if not spec.kv.is_one or spec.kv.k.is_packed:
        return f"keys that are values are {spec.kv.name}; the kernel takes one type whose codes are whole bytes"
    if not 16 <= spec.head_dim <= MOST_DIM or spec.head_dim % 8:
        return f"keys are {spec.head_dim} wide; the kernel takes multiples of 8 from 16 to {MOST_DIM}"
    return None


def pieces_of(spec: AttendSpec) -> tuple[int, int]:
    """Widths of a key's two pieces, powers of two: the largest that it has, and one that holds the rest, 0 if there is none."""
    first = 1 << (spec.head_dim.bit_length() - 1)
    rest = spec.head_dim - first
    return first, max(16, 1 << (rest - 1).bit_length()) if rest else 0


def tiles_for(spec: AttendSpec, columns: int, *, large: bool) -> AttendTiles:
    """large: a multiprocessor has more than 200 KB of shared memory. Queries and keys lie there together.

    More than 32 wide keys at a time fill all registers on sm_90, with a descriptor for each 16 dims of a key, and ptxas 12.8 (of Triton 3.6)
    then mixes the halves of some: an illegal memory access, or wrong numbers. tests/kernels/triton_targets.py looks for such code.
    """
    wide = sum(pieces_of(spec))
    keys = 64 if wide <= 128 else 32 if large or wide <= 320 else 16
    return AttendTiles(columns, keys, 2 if wide <= 320 else 1, 4 if wide <= 128 else 8)
