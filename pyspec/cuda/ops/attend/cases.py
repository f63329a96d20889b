"""Hostile cases for `attend`, shared by its tests, its benchmark and the check before it is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyspec.cuda.ops import ragged
from pyspec.cuda.ops.attend.ref import AttendSpec, first_seen, key_rows
from pyspec.cuda.ops.ragged import Ragged, padded, place, spoil
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_types import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, KvType, type_of


@dataclass(frozen=True, slots=True)
class Case:
    """seqs: (n_past, width) each. `block`: rows see all rows of their sequence. pad: (rows, sequences) of padding.
    pictures: (sequence, first, end) of positions whose rows see all of them.
    dtype: the type of keys, or its dtype where that tells it, and of values unless v_dtype is given.

    spare: pool pages without an owner; they, all rows beyond a sequence's end and all behind its window hold NaN.
    """

    n_head: int
    n_kv: int
    dim: int
    dtype: torch.dtype | KvType
    seqs: Sequence[tuple[int, int]]
    page_size: int = 16
    window: int = 0
    block: bool = False
    pad: tuple[int, int] = (0, 0)
    spare: int = 3
    scale: float = 0.0  # 0: 1 / sqrt(dim)
    sinks: bool = False
    cap: float = 0.0
    keys_only: bool = False
    n_value: int = 0  # keys alone are kept, and are the values, too
    v_dtype: torch.dtype | KvType | None = None
    pictures: Sequence[tuple[int, int, int]] = ()

    @property
    def kv(self) -> KvFormat:
        return KvFormat(type_of(self.dtype), type_of(self.v_dtype or self.dtype))

    @property
    def alone(self) -> bool:
        return self.keys_only or self.n_value > 0

    @property
    def tolerance(self) -> float:
        return max(_tolerance(self.kv.k), _tolerance(self.kv.v))


@dataclass(frozen=True, slots=True)
class Made:
    q: Tensor
    pool: KVPool
    batch: Batch  # with padding
    plain: Batch  # without, for the reference
    sinks: Tensor | None


TOLERANCE: dict[torch.dtype | KvType, float] = {
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.5e-2,
    torch.int8: 3e-3,
    torch.float8_e4m3fn: 2e-3,
    **dict.fromkeys((Q8_0, Q5_1, Q5_0, Q4_1, Q4_0), 3e-3),
}
"""Of a row's error over its norm: q and the weights are rounded to f16 or bf16, and so are the values of types with factors."""


def _tolerance(of: KvType) -> float:
    return TOLERANCE[of] if of in TOLERANCE else TOLERANCE[of.dtype]


def make(case: Case, device: torch.device, seed: int = 0) -> Made:
    gen, size = torch.Generator().manual_seed(seed), case.page_size
    placed = place(Ragged(case.seqs, size, spare=case.spare), device, seed, see_block=case.block)
    plain = _seeing(placed.plain, case.pictures)
    pool = KVPool(placed.n_page * size, case.n_kv, case.dim, case.kv, device, keys_only=case.alone)
    spoil(pool)
    for i, (past, _) in enumerate(case.seqs):
        rows = key_rows(plain, i)
        k, v = (torch.randn(len(rows), case.n_kv, case.dim, generator=gen).to(device) for _ in "kv")
        pool.write(rows, k, None if case.alone else v)
        if case.window and (hidden := first_seen(past, case.window)) > 0:
            spoil(pool, rows[:hidden])
    q = torch.randn(plain.n_row + case.pad[0], case.n_head, case.dim, generator=gen).to(device) * 2
    q *= usual(case.scale, case.dim)
    sinks = torch.randn(case.n_head, generator=gen).to(device) * 3 if case.sinks else None
    return Made(q, pool, padded(plain, *case.pad), plain, sinks)


def usual(scale: float, dim: int) -> float:
    """What random queries are multiplied with, so that scores have the size that they have with the scale 1 / sqrt(dim). Models with
    another scale norm their queries; with scores many times as large the smallest rounding would decide which key counts."""
    return dim**-0.5 / scale if scale else 1.0


def spec_of(case: Case, device: torch.device) -> AttendSpec:
    scale = case.scale or case.dim**-0.5
    own = case.kv, case.sinks, case.n_value, case.cap
    return AttendSpec(
        device, case.n_head, case.n_kv, case.dim, scale, *own, scattered=case.page_size == 1
    )


def _seeing(batch: Batch, pictures: Sequence[tuple[int, int, int]]) -> Batch:
    """With rows that see all of their picture."""
    if not pictures:
        return batch
    at, hi = batch.positions, batch.hi.clone()
    for s, first, end in pictures:
        inside = (batch.row_seq == s) & (first <= at) & (at < end)
        hi[inside] = min(end, batch.max_hi[s])
    return replace(batch, hi=hi, causal=False, ahead=max(end - first - 1 for _, first, end in pictures))


def only(made: Made, seq: int, first: int = 0, n: int | None = None) -> tuple[Tensor, Batch]:
    """Rows first..first+n-1 of one sequence as a batch of their own: q and batch."""
    rows, batch = ragged.only(made.plain, seq, first, n or made.plain.seqs[seq].width - first)
    return made.q[rows].contiguous(), batch


def worst(out: Tensor, want: Tensor) -> float:
    """The largest error of a row and head over its norm; infinite if anything is not finite."""
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    error = (out.double() - want.double()).norm(dim=-1) / want.double().norm(dim=-1)
    return float(error.max())
