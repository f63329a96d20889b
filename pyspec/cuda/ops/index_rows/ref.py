"""The compressed rows that a token attends to: a small network scores all rows, and the best are taken. Reference in plain torch.

    q       [row, head, dim]   f32    their last dims are turned here
    w       [row, head]        f32    weight of each head's score; a factor shared by all heads of a row changes no choice. None: all one
    freq    [n_rot / 2]        f64    angles of one position
    pool    the indexer's own compressed rows, keys only
    out     [row, top_k]       int32  ascending; -1 behind the last one

A token at position p sees the rows of all blocks that are complete with it: (p + 1) // ratio of them. If those are no more than top_k all
are taken and none is scored. Equal scores: the earlier row. A row's choice depends on itself alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.guard import Guard
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.rope_tail.ref import rope_tail
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool

GUARD = Guard(11)


@dataclass(frozen=True, slots=True)
class IndexSpec:
    device: torch.device
    n_head: int
    dim: int
    top_k: int
    ratio: int
    kv: torch.dtype
    n_rot: int


IndexRows = Callable[[Tensor, "Tensor | None", Tensor, KVPool, Batch], Tensor]


def block_rows(pool: KVPool, batch: Batch, seq: int, n_block: int) -> Tensor:
    """Rows in the pool of a sequence's first blocks. [n_block] int64"""
    size, ratio = batch.page_size, pool.tokens_per_row
    # The positions of the tokens that made the blocks
    lasts = ratio * torch.arange(1, n_block + 1, device=batch.page_table.device) - 1
    return pool.rows_of(batch.page_table[seq][lasts // size] * size + lasts % size, size)


def scored(q: Tensor, w: Tensor, keys: Tensor) -> Tensor:
    """q [head, dim], w [head], keys [block, dim] -> [block]"""
    return ((q @ keys.T).relu() * w[:, None]).sum(0)


def bind(spec: IndexSpec) -> IndexRows:
    def index_rows(q: Tensor, w: Tensor | None, freq: Tensor, pool: KVPool, batch: Batch) -> Tensor:
        w = torch.ones(q.shape[:2], device=q.device) if w is None else w
        out = torch.full((q.shape[0], spec.top_k), -1, dtype=torch.int32, device=q.device)
        for s, seq in enumerate(batch.seqs):
            n_block = (seq.n_past + seq.width) // spec.ratio
            here = slice(batch.starts[s], batch.starts[s + 1])
            seen = (batch.positions[here] + 1) // spec.ratio
            every = torch.arange(min(n_block, spec.top_k), dtype=torch.int32, device=q.device)
            out[here, : len(every)] = torch.where(every < seen[:, None], every, -1)
            if n_block <= spec.top_k:
                continue
            keys = pool.read(block_rows(pool, batch, s, n_block), torch.float32)[0][:, 0]
            own = rope_tail(q[here], batch.positions[here], freq)
            # Each row alone, with the blocks that it sees
            if current().is_exact and q.device.type == "cpu":
                each = [
                    scored(row, weights, keys[:n])
                    for row, weights, n in zip(own, w[here], seen.tolist(), strict=True)
                ]
                scores = torch.stack([F.pad(row, (0, n_block - len(row))) for row in each])
            else:
                scores = (torch.einsum("rhd,kd->rhk", own, keys).relu() * w[here, :, None]).sum(1)
            scores = scores.masked_fill(
                torch.arange(n_block, device=q.device) >= seen[:, None], -torch.inf
            )
            best = (
                scores.sort(dim=-1, descending=True, stable=True)
                .indices[:, : spec.top_k]
                .sort(-1)
                .values
            )
            out[here] = torch.where((seen > spec.top_k)[:, None], best.int(), out[here])
        return out

    return index_rows
