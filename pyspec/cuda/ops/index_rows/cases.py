"""Hostile compressed rows, shared by tests, benchmarks and checks of `index_rows`, `sparse_attend` and `compress`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cuda.ops.index_rows.ref import IndexRows, IndexSpec, block_rows
from pyspec.cuda.ops.ragged import PlacedCase, Ragged, only, place, spoil
from pyspec.cuda.ops.rope_tail.ref import rope_tail
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_types import type_of
from pyspec.slots.parts import rows_per_page

NEAR = {torch.float16: 2.0**-13, torch.bfloat16: 2.0**-10, torch.float32: 2.0**-20}
"""Relative to the products' sizes: scores this close may change places, because queries are rounded. A quarter of the largest possible error."""


def pool_for(placed: PlacedCase, ratio: int, dim: int, kv: torch.dtype, device: torch.device) -> KVPool:
    """Compressed rows, NaN where the op must not read."""
    n_row = placed.n_page * rows_per_page(placed.plain.page_size, ratio)
    pool = KVPool(
        n_row, 1, dim, KvFormat.both(type_of(kv)), device, tokens_per_row=ratio, keys_only=True
    )
    spoil(pool)
    return pool


def fill(pool: KVPool, batch: Batch, gen: torch.Generator, *, whole: bool = False) -> None:
    """Rows of all blocks that some token of the batch sees; `whole`: a few kinds, of small whole numbers, whose products are exact."""
    kinds = torch.randint(-2, 3, (7, 1, pool.head_dim), generator=gen).float()
    kinds[0] = 0.0
    for s, seq in enumerate(batch.seqs):
        n_block = (seq.n_past + seq.width) // pool.tokens_per_row
        shape = (n_block, 1, pool.head_dim)
        x = (
            kinds[torch.randint(0, 7, (n_block,), generator=gen)]
            if whole
            else torch.randn(shape, generator=gen)
        )
        pool.write(block_rows(pool, batch, s, n_block), x.to(pool.k.device), None)


@dataclass(frozen=True, slots=True)
class Asked:
    """Inputs of `index_rows`; queries of padded rows hold NaN."""

    placed: PlacedCase
    pool: KVPool
    q: Tensor
    w: Tensor
    freq: Tensor


def make(case: Ragged, spec: IndexSpec, seed: int = 0, *, whole: bool = False) -> Asked:
    """`whole`: scores are exact, because there is no rope, and many are equal."""
    gen, placed = torch.Generator().manual_seed(seed), place(case, spec.device, seed)
    pool = pool_for(placed, spec.ratio, spec.dim, spec.kv, spec.device)
    fill(pool, placed.plain, gen, whole=whole)
    n = placed.plain.n_row
    if whole:
        q = torch.randint(-2, 3, (n, spec.n_head, spec.dim), generator=gen).float()
        w = torch.randint(-4, 5, (n, spec.n_head), generator=gen).float() / 4
        w[::3] = -w[::3].abs()  # nothing above zero, and minus zero
    else:
        q = 3 * torch.randn(n, spec.n_head, spec.dim, generator=gen)
        w = torch.randn(n, spec.n_head, generator=gen) * (spec.n_head * spec.dim) ** -0.5
    spare = (case.pad[0], spec.n_head, spec.dim)
    q, w = torch.cat([q, torch.full(spare, torch.nan)]), torch.cat([w, torch.full(spare[:2], torch.nan)])
    freq = 160000.0 ** (-torch.arange(0, spec.n_rot, 2, dtype=torch.float64) / spec.n_rot) * (not whole)
    return Asked(placed, pool, q.to(spec.device), w.to(spec.device), freq.to(spec.device))


def fault_of(got: Tensor, asked: Asked, spec: IndexSpec) -> str | None:
    """The error in a choice: rows not ascending, too few or too many, or a worse row chosen over a better one."""
    batch, ratio = asked.placed.plain, spec.ratio
    if bool((got[batch.n_row :] != -1).any()):
        return "a padded row chose something"
    for s, seq in enumerate(batch.seqs):
        n_block = (seq.n_past + seq.width) // ratio
        keys = asked.pool.read(block_rows(asked.pool, batch, s, n_block), torch.float64)[0][:, 0]
        for i in range(seq.width):
            row, n = batch.starts[s] + i, (seq.n_past + i + 1) // ratio
            own, n_taken = got[row].long(), min(n, spec.top_k)
            where = f"row {i} of {seq.width} at {seq.n_past}"
            taken = own[:n_taken]
            if bool((own[n_taken:] != -1).any()) or bool((taken.diff() <= 0).any()):
                return f"{where} did not choose {n_taken} ascending rows"
            if n_taken and not 0 <= int(taken[0]) <= int(taken[-1]) < n:
                return f"{where} chose a row that it does not see"
            if n <= spec.top_k:
                continue
            q = rope_tail(asked.q[row : row + 1], batch.positions[row : row + 1], asked.freq)[0].double()
            w = asked.w[row].double()
            scores = (w[:, None] * (q @ keys[:n].T).relu()).sum(0)
            size = NEAR[spec.kv] * (w.abs()[:, None] * (q.abs() @ keys[:n].T.abs())).sum(0)
            rest = torch.ones(n, dtype=torch.bool, device=own.device)
            rest[taken] = False
            best, worst = (scores - size)[rest].amax(), (scores + size)[taken].amin()
            if not bool(best <= worst):
                return f"{where} passed over a score that is {float(best - worst):.2g} better"
    return None


def check(launch: IndexRows, reference: IndexRows, spec: IndexSpec) -> str | None:
    """Ragged widths and lengths around the number chosen; exact scores with many ties, to the row; others with a margin; rows alone."""
    full = spec.ratio * spec.top_k
    seqs = [
        (max(full - 9, 0), 17),
        (0, 1),
        (full + 700, 3),
        (max(spec.ratio - 2, 0), 1),
        (4 * full + 70, 2),
        (full + spec.ratio - 1, 1),
    ]
    for case in (Ragged(seqs, 32, (3, 2)), Ragged([(full // 2, 5), (3 * full + 1, 7)], 16)):
        asked = make(case, spec, whole=True)
        got = launch(asked.q, asked.w, asked.freq, asked.pool, asked.placed.batch)
        want = reference(asked.q, asked.w, asked.freq, asked.pool, asked.placed.plain)
        if not torch.equal(got, want):
            return f"{int((got != want).any(-1).sum())} of {len(got)} rows choose other rows than the reference"
        asked = make(case, spec)
        got = launch(asked.q, asked.w, asked.freq, asked.pool, asked.placed.batch)
        if (why := fault_of(got, asked, spec)) is not None:
            return why
        for seq in range(len(case.seqs)):
            rows, one = only(asked.placed.plain, seq, case.seqs[seq][1] - 1, 1)
            if not torch.equal(
                launch(asked.q[rows], asked.w[rows], asked.freq, asked.pool, one), got[rows]
            ):
                return f"a row of sequence {seq} chooses others alone than in company"
    return None
