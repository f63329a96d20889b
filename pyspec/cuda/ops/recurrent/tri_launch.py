"""Shared by the Triton launchers of recurrent layers."""

from __future__ import annotations

from torch import Tensor

from pyspec.cuda.ops.recurrent.fold_only import fold_batch
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer

TAPS = 4
ROWS = 16  # of a step of the convolution
SPAN = 64  # rows of one program of the convolution, where a sequence has many


def meta_of(batch: Batch) -> tuple[Tensor, ...]:
    return batch.seq_slot, batch.seq_start, batch.seq_fold, batch.seq_keep


def meta_of_fold(layer: StateLayer, slot: int, n_fold: int) -> tuple[Tensor, ...]:
    """The same of one sequence that only folds."""
    return fold_batch(layer.state.device, slot, n_fold)


def stretches(n_row: int, n_seq: int, width: int) -> int:
    """Programs of the convolution along a sequence's rows: one takes several stretches if it must."""
    return -(-n_row // SPAN) if n_row > n_seq * width else 1
