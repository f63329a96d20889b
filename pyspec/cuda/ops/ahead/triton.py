"""`ahead` in Triton: a launch each (triton_kernels.py)."""

from __future__ import annotations

from torch import Tensor

from pyspec.cuda import tri
from pyspec.cuda.ops.ahead.ref import GUARD, MAX_ENDS, IntoBuffers, Kept, moved
from pyspec.slots.batch import Batch

ROWS = 128  # of a program that moves
ACCEPTED = 32  # rows of a step of `accept`


class AheadTriton(IntoBuffers):
    def accept(
        self, best: Tensor, batch: Batch, ends: Tensor | None = None, forced: Tensor | None = None
    ) -> Kept:
        from pyspec.cuda.ops.ahead import triton_kernels as kernels

        kept = self.buffers.room(best, batch, ends)
        beside = (self.buffers.n if t is None else t for t in (ends, forced))
        found = kept.n, kept.tokens, kept.last, kept.goes
        has = {"HAS_ENDS": ends is not None, "HAS_FORCED": forced is not None}
        args = (best[0], batch.tokens, batch.seq_start, *beside, *found, batch.n_row)
        constants = {**has, "N_END": MAX_ENDS, "ROWS": ACCEPTED}
        tri.launch(kernels.ahead_accept, (len(batch.seqs),), args, constants, 1)
        return kept

    def _launch(self, batch: Batch, kept: Kept | None, drafts: Tensor | None, *, moves: bool) -> None:
        from pyspec.cuda.ops.ahead import triton_kernels as kernels

        of = self.buffers if kept is None else kept
        found = of.n, of.tokens, of.last, of.goes
        beside = self.buffers.tokens if drafts is None else drafts, self.fault
        has = {"MOVES": moves, "HAS_KEPT": kept is not None, "HAS_DRAFTS": drafts is not None}
        tri.launch(
            kernels.ahead_move,
            (-(-len(batch.positions) // ROWS),),
            (*moved(batch), *found, *beside, *self._sizes(batch, kept, drafts)),
            {**has, "PAGE": batch.page_size, "ROWS": ROWS, "OP": GUARD.number},
            4,
        )


bind = AheadTriton
