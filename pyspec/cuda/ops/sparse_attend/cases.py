"""Hostile cases for `sparse_attend`, shared by its tests, its benchmark and the check before it is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyspec.cuda.ops.attend.cases import TOLERANCE, worst
from pyspec.cuda.ops.index_rows.cases import fill, pool_for
from pyspec.cuda.ops.ragged import PlacedCase, Ragged, copied, only, place
from pyspec.cuda.ops.rows.cuda import MAX_COLUMNS, RowBuffer, RowsLaunch, values_of
from pyspec.cuda.ops.sparse_attend.ref import ROWS, KeyTail, SparseAttend, SparseSpec
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool
from pyspec.slots.ring import RingRows


@dataclass(frozen=True, slots=True)
class Windowed:
    """Inputs of `sparse_attend`. NaN in queries of padded rows, in ring rows outside the window, and in pool rows that no row sees."""

    placed: PlacedCase
    q: Tensor
    kv: Tensor
    tail: KeyTail
    ring: RingRows
    pool: KVPool | None
    chosen: Tensor | None
    sinks: Tensor

    def run(
        self, attend: SparseAttend, batch: Batch, rows: slice = slice(None)
    ) -> tuple[Tensor, RingRows]:
        """The result for some rows, and the ring after that; the own one stays."""
        ring = copied(self.ring)
        chosen = None if self.chosen is None else self.chosen[rows]
        return attend(
            self.q[rows], self.kv[rows], self.tail, ring, self.pool, chosen, self.sinks, batch
        ), ring


def make(case: Ragged, spec: SparseSpec, top_k: int = 0, seed: int = 0, slack: int = 34) -> Windowed:
    """`top_k` > 0: that many of the compressed rows are chosen, at random."""
    gen, placed = torch.Generator().manual_seed(seed), place(case, spec.device, seed)
    batch, n = placed.plain, placed.plain.n_row
    ring = RingRows({ROWS: (spec.dim,)}, placed.n_slot, spec.window, slack, spec.kv, spec.device)
    ring.rows[ROWS].fill_(torch.nan)
    for seq in batch.seqs:
        first = max(0, seq.n_past - spec.window)
        ring.write(
            seq.slot,
            first,
            {ROWS: torch.randn(seq.n_past - first, spec.dim, generator=gen).to(ring.rows[ROWS])},
        )
    pool = pool_for(placed, spec.ratio, spec.dim, spec.kv, spec.device) if spec.ratio else None
    if pool is not None:
        fill(pool, batch, gen)
    chosen = None
    if top_k:
        chosen = torch.full((n + case.pad[0], top_k), -1, dtype=torch.int32)
        chosen[n:] = 1 << 30  # of padding
        for row, at in enumerate(batch.positions.tolist()):
            seen = (at + 1) // spec.ratio
            own = torch.randperm(seen, generator=gen)[:top_k].sort().values
            chosen[row, : len(own)] = own.int()
        chosen = chosen.to(spec.device)
    n_q = spec.n_head * spec.dim
    # Queries and keys lie in rows of more
    products = torch.randn(n + case.pad[0], n_q + spec.dim + 4, generator=gen)
    products[n:] = torch.nan
    q, kv, _ = products.to(spec.device).split([n_q, spec.dim, 4], -1)
    norm = 1 + 0.3 * torch.randn(spec.dim, generator=gen)
    freq = 10000.0 ** (-torch.arange(0, spec.n_rot, 2, dtype=torch.float64) / spec.n_rot)
    tail = KeyTail(norm.to(spec.device), freq.to(spec.device))
    sinks = 3 * torch.randn(spec.n_head, generator=gen)
    q = q.view(-1, spec.n_head, spec.dim)
    return Windowed(placed, q, kv, tail, ring, pool, chosen, sinks.to(spec.device))


def ring_fault(ring: RingRows, kept: RingRows) -> str | None:
    """The difference of a ring from the reference's, if it is more than one rounding."""
    own, other = (x.rows[ROWS].float() for x in (ring, kept))
    if not torch.equal(own.isnan(), other.isnan()):
        return "other rows of the ring are written than by the reference"
    step = 2.0**-10 if ring.rows[ROWS].dtype is torch.float16 else 2.0**-7
    off = float(((own - other).abs() - step * other.abs() - 1e-5).nan_to_num(0.0).amax())
    return (
        None
        if off <= 0
        else f"a key in the ring differs from the reference by {off:.2g} more than it may"
    )


def difference(
    made: Windowed, attend: SparseAttend, reference: SparseAttend, spec: SparseSpec
) -> str | None:
    """How results or rings differ from the reference's; None if they do not."""
    n = made.placed.plain.n_row
    (got, ring), (want, kept) = (
        made.run(attend, made.placed.batch),
        made.run(reference, made.placed.plain, slice(0, n)),
    )
    if (off := worst(got[:n], want)) > TOLERANCE[spec.kv]:
        return f"a row differs from the reference by {off:.2g} of its norm"
    if bool((got[n:] != 0).any()):
        return "a padded row is not zero"
    if (why := ring_fault(ring, kept)) is not None:
        return why
    if hasattr(attend, "prepared") and (why := _prepared_fault(made, attend, got, ring)) is not None:
        return why
    for seq, old in enumerate(made.placed.plain.seqs):
        rows, one = only(made.placed.plain, seq, 0, 1)
        alone = made.run(attend, one, rows)[0]
        if len(got) > getattr(attend, "exact_rows", len(got)):
            if (off := worst(alone, got[rows])) > TOLERANCE[spec.kv]:
                return f"the first of {old.width} rows at {old.n_past} differs alone by {off:.2g} of its norm"
        elif not torch.equal(alone, got[rows]):
            return f"the first of {old.width} rows at {old.n_past} has other bits alone"
    return None


def _prepared_fault(made: Windowed, attend: Any, got: Tensor, kept: RingRows) -> str | None:
    """How rows that are written for the next product differ from those of a call."""
    n, n_in, ring, power = len(got), got[0].numel(), copied(made.ring), 4.0
    if n_in % 256 or n_in > MAX_COLUMNS:
        return None
    launch = RowsLaunch(got.device, n_in, (-(-n // 8) * 8,))
    launch.powers.fill_(torch.nan)
    given = made.q, made.kv, made.tail, ring, made.pool, made.chosen, made.sinks
    rows = attend.prepared(given, made.placed.batch, RowBuffer(launch, launch.blocks, power))
    values, sums = values_of(rows, n_in)
    if not torch.equal(values, (got.flatten(1) / power).half().float() * power):
        return "rows that are written for a product are not those of a call, rounded"
    if not torch.allclose(sums, values.unflatten(1, (-1, 32)).sum(-1), rtol=1e-5, atol=1e-3):
        return "sums of rows that are written for a product are not theirs"
    return ring_fault(ring, kept)


def check(attend: SparseAttend, reference: SparseAttend, spec: SparseSpec) -> str | None:
    """Ragged widths, windows that are not full, rings that wrap, more rows than a ring has, blocks that are as long as several pages."""
    window, top_k = spec.window, 0 if spec.ratio != 4 else 512  # the indexer's layers have small blocks
    seqs = [(0, 1), (3, 17), (window - 1, 3), (5 * window + 7, 2), (2500, 5), (9 * 128 - 1, 1)]
    cases = [
        Ragged(seqs, 32, (3, 2)),
        Ragged([(40, window + 60), (1270, 9), (0, 5)], 16, (1, 1)),
        Ragged([(4200, 1)], 64),
    ]
    for i, case in enumerate(cases):
        if (why := difference(make(case, spec, top_k, i), attend, reference, spec)) is not None:
            return why
    if top_k and (why := difference(make(cases[0], spec, 8, 7), attend, reference, spec)) is not None:
        return why
    if spec.ratio:  # all visible rows, enough for several tiles in a part
        long = Ragged([(2300 * spec.ratio, 2), (3, 1), (40 * spec.ratio, 1)], 64)
        return difference(make(long, spec, 0, 8), attend, reference, spec)
    return None
