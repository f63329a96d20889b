"""Hostile batches, shared by tests, benchmarks and checks of ops over pages: ragged, with padding, and NaN where an op must not read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyspec.slots.batch import Batch, Seq, lay_out
from pyspec.slots.kv import KVPool
from pyspec.slots.ring import RingRows
from pyspec.slots.table import SlotTable


@dataclass(frozen=True, slots=True)
class Ragged:
    """seqs: (n_past, width) each; slots have other numbers. pad: (rows, sequences) of padding. spare: pages without an owner."""

    seqs: Sequence[tuple[int, int]]
    page_size: int = 32
    pad: tuple[int, int] = (0, 0)
    spare: int = 3


@dataclass(frozen=True, slots=True)
class PlacedCase:
    """The same rows with padding, for kernels, and without, for references."""

    batch: Batch
    plain: Batch
    n_page: int
    n_slot: int


def place(case: Ragged, device: torch.device, seed: int = 0, *, see_block: bool = False) -> PlacedCase:
    """The batch over pages in an order of their own. see_block: as of `lay_out`."""
    gen, size, n_slot = torch.Generator().manual_seed(seed), case.page_size, len(case.seqs) + 2
    counts = [-(-(past + width) // size) for past, width in case.seqs]
    n_page = sum(counts) + case.spare
    order = torch.randperm(n_page, generator=gen)[: sum(counts)].split(counts)
    slots = torch.randperm(n_slot, generator=gen)[: len(case.seqs)].tolist()
    seqs = [Seq(slot, past, [0] * width) for slot, (past, width) in zip(slots, case.seqs, strict=True)]
    pages = [own.numpy() for own in order]
    table = SlotTable(n_slot, n_page, size)
    plain = lay_out(table, seqs, device, pages=pages, see_block=see_block)
    return PlacedCase(padded(plain, *case.pad), plain, n_page, n_slot)


def padded(batch: Batch, n_row: int, n_seq: int) -> Batch:
    """With rows and sequences of padding as in an arena, but with metadata that must not be used."""

    def more(t: Tensor, n: int, value: int) -> Tensor:
        return torch.cat([t, t.new_full((n, *t.shape[1:]), value)])

    wild = 1 << 40
    return replace(
        batch,
        positions=more(batch.positions, n_row, wild),
        kv_rows=more(batch.kv_rows, n_row, wild),
        lo=more(batch.lo, n_row, -wild),
        hi=more(batch.hi, n_row, wild),
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
        lo=batch.lo[rows],
        hi=batch.hi[rows],
        page_table=batch.page_table[seq : seq + 1],
        seq_slot=batch.seq_slot[seq : seq + 1],
        seq_start=batch.seq_start.new_tensor([0, n]),
        row_seq=torch.zeros_like(batch.row_seq[rows]),
        max_hi=[batch.max_hi[seq]],
    )
    return rows, one


def spoil(pool: KVPool, rows: Tensor | slice = slice(None)) -> None:
    """NaN in these rows; of whole codes in the factors, behind codes that would do harm without them."""
    for plane in pool.planes:
        plane[rows] = torch.nan if plane.dtype.is_floating_point else 77


def copied(ring: RingRows) -> RingRows:
    """A ring as it is, to be written."""
    first = next(iter(ring.rows.values()))
    dims = {name: plane.shape[2:] for name, plane in ring.rows.items()}
    out = RingRows(dims, len(first), ring.window, ring.slack, first.dtype, first.device)
    for name, plane in ring.rows.items():
        out.rows[name].copy_(plane)
    return out
