"""Shared by the launchers of recurrent layers: the cut of a state into blocks, the chunked sequences, the metadata of a batch.

Both have a kernel for the convolution and the gates (conv), and one that folds records and runs rows over the state (rows). A lane
of the latter holds a few of the state's columns; their number changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda import jit
from pyspec.cuda.ops.recurrent.fold_only import fold_batch
from pyspec.slots.arena import BUCKETS
from pyspec.slots.batch import Batch, Seq
from pyspec.slots.recurrent import StateLayer

TAPS, LANES, THREADS, CONV_THREADS = 4, 8, 128, 128
SPAN = 64  # rows of one block of conv
COLUMNS = (2, 4)  # of a lane; one was never faster on an H200
CHUNKED = BUCKETS[-1] + 1  # rows from which a kept sequence is chunked: more than a graph has
NEVER = 2**31 - 1


def blocks_for(arch: str, columns: int) -> int:
    """Blocks of rows on a multiprocessor, which bounds their registers: as many as compile without spills."""
    newer = arch.startswith(("sm_10", "sm_11", "sm_12"))  # their compiler takes more registers for the same source
    return ({2: 4, 4: 3} if newer else {2: 5, 4: 4})[columns]


def waves(n_state_row: int, columns: int, arch: str, n_multiprocessor: int) -> float:
    """Waves of blocks of the rows kernel, for `n_state_row` rows of states."""
    return n_state_row * LANES // (THREADS * columns) / (blocks_for(arch, columns) * n_multiprocessor)


def chunked_of(batch: Batch, chunked: int) -> list[Seq]:
    """Sequences that are chunked. Batches in a graph have none, because it is replayed for others; but graphs of prompts chunk all their
    sequences, and are captured with the most rows they may have."""
    return (
        []
        if batch.bucket is not None and not batch.prompt
        else [s for s in batch.seqs if s.keep and s.width >= chunked]
    )


def stretches(n_row: int, n_seq: int, width: int) -> int:
    """Blocks of conv along a sequence's rows: one takes several stretches if it must."""
    return -(-n_row // SPAN) if n_row > n_seq * width else 1


@dataclass(frozen=True, slots=True)
class ChunkedBatch:
    """A batch with sequences that go in chunks.

    counts   arguments of the batch: `counts_of`, and how many sequences it has
    n_seq    sequences; n_long: those that are chunked; n_chunk: chunks of all of them
    fault    where kernels' guards write
    """

    counts: Sequence[jit.Arg]
    n_seq: int
    n_long: int
    n_chunk: int
    fault: Tensor


def counts_of(batch: Batch, layer: StateLayer, n_row: int, chunked: int) -> list[jit.Arg]:
    """Arguments of a batch: seq.cuh's Meta."""
    meta = [batch.seq_slot, batch.seq_start, batch.seq_fold, batch.seq_keep]
    return [*meta, *map(np.int32, (layer.state.shape[0], layer.width, n_row, chunked))]


def counts_of_fold(device: torch.device, layer: StateLayer, slot: int, n_fold: int) -> list[jit.Arg]:
    """The same of one sequence that only folds."""
    return [*fold_batch(device, slot, n_fold), *map(np.int32, (layer.state.shape[0], layer.width, 0, NEVER))]
