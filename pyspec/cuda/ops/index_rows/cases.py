"""Hostile batches over compressed rows, shared by tests, benchmarks and checks of `index_rows`, `sparse_attend` and `compress`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyspec.cuda.ops.attend.cases import spoil
from pyspec.cuda.ops.index_rows.ref import IndexRows, IndexSpec, block_rows
from pyspec.cuda.ops.rope_tail.ref import rope_tail
from pyspec.slots.batch import Batch, Seq, lay_out
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_types import type_of
from pyspec.slots.parts import rows_per_page
from pyspec.slots.table import SlotTable

NEAR = {torch.float16: 2.0**-13, torch.bfloat16: 2.0**-10, torch.float32: 2.0**-20}
"""Relative to the products' sizes: scores this close may change places, because queries are rounded. A quarter of the largest possible error."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """seqs: (n_past, width) each; no slot has its sequence's number. pad: (rows, sequences) of padding."""

    seqs: Sequence[tuple[int, int]]
    page_size: int = 32
    pad: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class PlacedCase:
    """The same rows with padding, for kernels, and without, for references."""

    batch: Batch
    plain: Batch
    n_page: int
    n_slot: int


def place(case: Ragged, device: torch.device, seed: int = 0) -> PlacedCase:
    """The batch over pages in an order of their own, some without an owner."""
    gen, size, n_slot = torch.Generator().manual_seed(seed), case.page_size, len(case.seqs) + 2
    counts = [-(-(past + width) // size) for past, width in case.seqs]
    n_page = sum(counts) + 3
    order = torch.randperm(n_page, generator=gen)[: sum(counts)].split(counts)
    slots = torch.randperm(n_slot, generator=gen)[: len(case.seqs)].tolist()
    seqs = [Seq(slot, past, [0] * width) for slot, (past, width) in zip(slots, case.seqs, strict=True)]
    pages = [own.numpy() for own in order]
    plain = lay_out(SlotTable(n_slot, n_page, size), seqs, device, pages=pages)
    return PlacedCase(padded(plain, *case.pad), plain, n_page, n_slot)


def padded(batch: Batch, n_row: int, n_seq: int) -> Batch:
    """With rows and sequences of padding as in an arena, but with positions and pages that must not be used."""

    def more(t: Tensor, n: int, value: int) -> Tensor:
        return torch.cat([t, t.new_full((n, *t.shape[1:]), value)])

    wild = 1 << 40
    return replace(
        batch,
        positions=more(batch.positions, n_row, wild),
        kv_rows=more(batch.kv_rows, n_row, wild),
        row_seq=more(batch.row_seq, n_row, -1),
        page_table=more(batch.page_table, n_seq, -wild),
        seq_slot=more(batch.seq_slot, n_seq, 0),
        seq_start=more(batch.seq_start, n_seq, batch.n_row),
    )


def only(batch: Batch, seq: int, first: int, n: int) -> tuple[slice, Batch]:
    """Rows first..first + n - 1 of one sequence as a batch of their own, and where they were."""
    old, start = batch.seqs[seq], batch.starts[seq] + first
    rows = slice(start, start + n)
    one = replace(
        batch,
        seqs=[Seq(old.slot, old.n_past + first, [0] * n)],
        starts=[0, n],
        tokens=batch.tokens[rows],
        positions=batch.positions[rows],
        kv_rows=batch.kv_rows[rows],
        page_table=batch.page_table[seq : seq + 1],
        seq_slot=batch.seq_slot[seq : seq + 1],
        seq_start=batch.seq_start.new_tensor([0, n]),
        row_seq=torch.zeros_like(batch.row_seq[rows]),
        max_hi=[old.n_past + first + n],
    )
    return rows, one


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
