"""What the Triton launchers of recurrent layers share."""

from __future__ import annotations

from torch import Tensor

from pyspec.cuda.ops.recurrent.fold_only import fold_batch
from pyspec.slots.arena import BUCKETS
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer

TAPS = 4
ROWS = 16  # of a step of the convolution
SPAN = 64  # rows of one program of the convolution, where a sequence has many
NEVER = 2**31 - 1
CHUNKED = BUCKETS[-1] + 1  # rows from which a kept sequence is chunked: such batches are never in a graph, alone or not


def meta_of(batch: Batch) -> tuple[Tensor, ...]:
    return batch.seq_slot, batch.seq_start, batch.seq_fold, batch.seq_keep


def meta_of_fold(layer: StateLayer, slot: int, n_fold: int) -> tuple[Tensor, ...]:
    """The same of one sequence that only folds."""
    return fold_batch(layer.state.device, slot, n_fold)


def long_of(batch: Batch, chunked: int) -> list[tuple[int, int]]:
    """(number, rows) of sequences that are chunked: only of batches that run as they are, for a graph's are replayed for others."""
    if batch.bucket is not None:
        return []
    return [(s, seq.width) for s, seq in enumerate(batch.seqs) if seq.keep and seq.width >= chunked]


def stretches(n_row: int, n_seq: int, width: int) -> int:
    """Programs of the convolution along a sequence's rows: one takes several stretches if it must."""
    return -(-n_row // SPAN) if n_row > n_seq * width else 1
