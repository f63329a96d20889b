"""`ahead` in Triton: a launch each (triton_kernels.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import tri
from pyspec.cuda.faults import record
from pyspec.cuda.ops.ahead.ref import GUARD, MAX_ENDS, AheadSpec, Kept
from pyspec.slots.batch import Batch

ROWS = 128  # of a program that moves
ACCEPTED = 32  # rows of a step of `accept`


def limits(spec: AheadSpec) -> str | None:
    return tri.missing(spec.device)


class AheadTriton:
    """Implements `Ahead`."""

    def __init__(self, spec: AheadSpec) -> None:
        self.device, self.fault = spec.device, record(spec.device)
        self._make(spec.n_seq, spec.n_row)

    def _make(self, n_seq: int, n_row: int) -> None:
        """Buffers for the results of `accept` for so many sequences and rows."""
        self.n = torch.ones(n_seq, dtype=torch.int32, device=self.device)
        self.goes = torch.ones(n_seq, dtype=torch.int32, device=self.device)
        self.last = torch.zeros(n_seq, dtype=torch.int64, device=self.device)
        self.tokens = torch.zeros(n_row, dtype=torch.int64, device=self.device)

    def accept(
        self, best: Tensor, batch: Batch, ends: Tensor | None = None, forced: Tensor | None = None
    ) -> Kept:
        from pyspec.cuda.ops.ahead import triton_kernels as kernels

        n_seq, n_row = len(batch.seqs), batch.n_row
        if n_seq > len(self.n) or n_row > len(self.tokens):  # more than was planned
            self._make(max(n_seq, len(self.n)), max(n_row, len(self.tokens)))
        assert best.dtype == torch.float64
        assert ends is None or (
            ends.dtype == torch.int32 and ends.shape == (n_seq, MAX_ENDS) and ends.is_contiguous()
        )
        kept = Kept(self.n[:n_seq], self.tokens[:n_row], self.last[:n_seq], self.goes[:n_seq])
        beside = (self.n if t is None else t for t in (ends, forced))
        found = kept.n, kept.tokens, kept.last, kept.goes
        constants = {
            "HAS_ENDS": ends is not None,
            "HAS_FORCED": forced is not None,
            "N_END": MAX_ENDS,
            "ROWS": ACCEPTED,
        }
        args = (best[0], batch.tokens, batch.seq_start, *beside, *found, n_row)
        tri.launch(kernels.ahead_accept, (n_seq,), args, constants, 1)
        return kept

    def move(self, batch: Batch, kept: Kept, drafts: Tensor | None = None) -> Batch:
        self._launch(batch, kept, drafts, moves=True)
        return batch

    def follow(self, batch: Batch, kept: Kept) -> None:
        self._launch(batch, kept, None, moves=False)

    def step(self, batch: Batch) -> Batch:
        self._launch(batch, None, None, moves=True)
        return batch

    def _launch(self, batch: Batch, kept: Kept | None, drafts: Tensor | None, *, moves: bool) -> None:
        from pyspec.cuda.ops.ahead import triton_kernels as kernels

        n_row, (n_seq, n_page) = batch.positions.shape[0], batch.page_table.shape
        of_kept = (self.n, self.tokens, self.last, self.goes)
        if kept is not None:
            of_kept = (kept.n, kept.tokens, kept.last, kept.goes)
        steps = (0, 0) if drafts is None else drafts.stride()
        n_draft, n_next = (
            0 if drafts is None else drafts.shape[1],
            0 if kept is None else len(kept.tokens),
        )
        layout = (
            batch.tokens,
            batch.positions,
            batch.kv_rows,
            batch.hi,
            batch.out_rows,
            batch.seq_fold,
            batch.seq_keep,
        )
        of_rows = (batch.seq_start, batch.row_seq, batch.page_table)
        beside = (self.tokens if drafts is None else drafts, self.fault)
        has = {"MOVES": moves, "HAS_KEPT": kept is not None, "HAS_DRAFTS": drafts is not None}
        tri.launch(
            kernels.ahead_move,
            (-(-n_row // ROWS),),
            (*layout, *of_rows, *of_kept, *beside, *steps, n_draft, n_row, n_seq, n_next, n_page),
            {**has, "PAGE": batch.page_size, "ROWS": ROWS, "OP": GUARD.number},
            4,
        )


def bind(spec: AheadSpec) -> AheadTriton:
    """Bind with result buffers of its own, because two engines may share a stream."""
    return AheadTriton(spec)
