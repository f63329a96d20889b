"""Arguments of the CPU kernels that read tokens of a batch, rings and rows of a pool: structs of native/tokens.h, in their order."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.guard import Guard
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool
from pyspec.slots.parts import rows_per_page
from pyspec.slots.ring import RingRows

TOKENS, POOL = "12q", "7q"
MOST_COLUMNS = 1024  # of a row of a pool

Arg = Tensor | int | None


def width_limit(dim: int) -> str | None:
    """Why a kernel over keys of `dim` numbers does not run; None if it does."""
    if dim % 8 or dim > MOST_COLUMNS:
        return f"keys are {dim} wide; the kernel takes multiples of 8 up to {MOST_COLUMNS}"
    return None


def tokens_args(batch: Batch, guard: Guard) -> list[Arg]:
    """Of the whole batch, with its padding."""
    longs = batch.positions, batch.kv_rows, batch.page_table
    seqs = batch.row_seq, batch.seq_start, batch.seq_slot
    assert all(t.dtype == torch.int64 and t.is_contiguous() for t in longs)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in seqs)
    n_row, (n_seq, n_col) = len(batch.positions), batch.page_table.shape
    assert len(batch.kv_rows) == len(batch.row_seq) == n_row and len(batch.seq_start) == n_seq + 1
    fault = faults.record(batch.positions.device)
    return [*longs, *seqs, fault, guard.number, n_row, n_seq, n_col, batch.page_size]


def pool_args(pool: KVPool | None, page_size: int) -> list[Arg]:
    """Of a pool with one head and keys only; None: there is none."""
    if pool is None:
        return [None, None, 0, 1, 0, 0, 1]
    assert pool.n_head == 1 and pool.keys_only and all(t.is_contiguous() for t in pool.planes)
    ratio = pool.tokens_per_row
    per_page, kind = rows_per_page(page_size, ratio), pool.kv.k.kind
    return [pool.k, pool.k_scale, pool.n_row, per_page, kind, pool.head_dim, ratio]


def plane(ring: RingRows, name: str, width: int) -> Tensor:
    """The rows [slot, row, width] f32 of that name."""
    rows = ring.rows[name]
    assert rows.dtype == torch.float32 and rows.is_contiguous() and rows.shape[2:] == (width,)
    return rows
