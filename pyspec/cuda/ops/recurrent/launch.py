"""Shared by the launchers of recurrent layers, in CUDA and in Triton.

Both recurrences have a kernel for the convolution and the gates (conv), and one that folds records and runs rows over the state (rows);
CUDA has further ones for long kept sequences, in chunks. A lane of rows holds a few of the state's columns; their number changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cuda import jit
from pyspec.cuda.context import per_device
from pyspec.cuda.ops.recurrent.ref import has_records
from pyspec.slots.arena import BUCKETS
from pyspec.slots.batch import Batch, Seq
from pyspec.slots.recurrent import StateLayer

TAPS, LANES, THREADS, CONV_THREADS = 4, 8, 128, 128
SPAN = 64  # rows of one block of conv
COLUMNS = (2, 4)  # of a lane; one was never faster on an H200
CHUNKED = BUCKETS[-1] + 1  # rows from which a kept sequence is chunked: more than a graph has
NEVER = 2**31 - 1
FOLD_ONLY = 2  # in seq_keep: see seq.cuh
UNIT = 4  # values that CUDA kernels read at once

Meta = Sequence[Tensor]
"""(slot, start, fold, keep) of the sequences of a batch, int32: seq.cuh's Meta."""
Fold = Callable[[StateLayer, int, int], None]


def meta_of(batch: Batch) -> Meta:
    return batch.seq_slot, batch.seq_start, batch.seq_fold, batch.seq_keep


@per_device
def meta_of_fold(device: torch.device, slot: int, n_fold: int) -> Meta:
    """Of one sequence without rows."""
    values = torch.tensor([slot, 0, 0, n_fold, FOLD_ONLY], dtype=torch.int32, device=device)
    return values.split([1, 2, 1, 1])


def folding(run: Callable[[StateLayer, Meta], None]) -> Fold:
    """fold(layer, slot, n): like the reference's flush, with the kernels that fold before rows, so to the same bits. `run` launches them."""

    def fold(layer: StateLayer, slot: int, n_fold: int) -> None:
        if has_records(layer, slot, n_fold):
            run(layer, meta_of_fold(layer.state.device, slot, n_fold))

    return fold


def counts_of(meta: Meta, layer: StateLayer, n_row: int = 0, chunked: int = NEVER) -> list[jit.Arg]:
    """Arguments of a batch for CUDA kernels; as it stands, of one that only folds."""
    return [*meta, layer.state.shape[0], layer.width, n_row, chunked]


def check_rows(
    op: str,
    rows: Sequence[Tensor],
    layer: StateLayer,
    unit: int = 1,
    n_part: int = 1,
    per_head: Sequence[int] = (1, 1),
) -> None:
    """Assert dtypes, shapes and alignment of m [row, n_part * channel] and of gates [row, head], which only our own code can get wrong.

    unit      values; rows of m begin at multiples of it, and so do gates with as many numbers a head
    per_head  numbers of each gate
    """
    m, *gates = rows
    assert all(t.dtype == torch.float32 and t.device == layer.state.device for t in rows), (
        f"{op} takes float32"
    )
    assert all(t.stride(1) == 1 for t in rows), f"{op} takes rows in one piece"
    wide = [m, *(t for t, n in zip(gates, per_head, strict=False) if n > 1)]
    assert all(t.stride(0) % unit == 0 and t.data_ptr() % (4 * unit) == 0 for t in wide), (
        f"rows of {op} start at {4 * unit} bytes"
    )
    assert m.shape[1] == n_part * layer.shape.n_channel and all(
        t.shape == (len(m), n * layer.state.shape[1]) for t, n in zip(gates, per_head, strict=False)
    )


def check_kept(
    op: str, weights: Sequence[Tensor], per_head: Sequence[int], layer: StateLayer, unit: int = 1
) -> None:
    """The same for the layer's own tensors: weights of the heads (of each so many numbers a head), the convolution's weights, and its bias
    if it has one."""
    whole, n_channel = (*weights, *layer.tensors()), layer.shape.n_channel
    assert all(t.dtype == torch.float32 and t.device == layer.state.device for t in whole), (
        f"{op} takes float32"
    )
    assert all(t.is_contiguous() for t in whole), (
        f"{op} takes contiguous tensors, or rows that are slices of wider rows"
    )
    assert all(t.data_ptr() % (4 * unit) == 0 for t in whole), (
        f"tensors of {op} start at {4 * unit} bytes"
    )
    of_heads = [(n * layer.state.shape[1],) for n in per_head]
    sizes = [*of_heads, (n_channel, layer.shape.n_conv), (n_channel,)]
    assert [tuple(t.shape) for t in weights] == sizes[: len(weights)]


def conv_args(
    inputs: Sequence[jit.Arg],
    layer: StateLayer,
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    counts: Sequence[jit.Arg],
    *rest: jit.Arg,
) -> list[jit.Arg]:
    """Of CUDA's conv: what it reads, the layer's window and records, room for its results of records and of rows, the batch."""
    return [*inputs, layer.conv, *layer.records(), *old, *new, *counts, *rest]


def stretches(n_row: int, n_seq: int, width: int) -> int:
    """Blocks of conv along a sequence's rows: one takes several stretches if it must."""
    return -(-n_row // SPAN) if n_row > n_seq * width else 1


def blocks_for(arch: str, columns: int) -> int:
    """Blocks of rows on a multiprocessor, which bounds their registers: as many as compile without spills."""
    # Their compiler takes more registers for the same source
    newer = arch.startswith(("sm_10", "sm_11", "sm_12"))
    return ({2: 4, 4: 3} if newer else {2: 5, 4: 4})[columns]


def waves(n_state_row: int, columns: int, arch: str, n_multiprocessor: int) -> float:
    """Waves of blocks of the rows kernel, for `n_state_row` rows of states."""
    return n_state_row * LANES // (THREADS * columns) / (blocks_for(arch, columns) * n_multiprocessor)


def rows_grid(n_head: int, dim: int, columns: int, n_seq: int) -> tuple[int, int, int]:
    """Blocks of the rows kernel, for states of `dim` rows."""
    return n_head, dim * LANES // (THREADS * columns), n_seq


def chunked_of(batch: Batch, chunked: int) -> list[Seq]:
    """Sequences that are chunked. Batches in a graph have none, because it is replayed for others; but graphs of prompts chunk all their
    sequences, and are captured with the most rows they may have."""
    return (
        []
        if batch.bucket is not None and not batch.prompt
        else [s for s in batch.seqs if s.keep and s.width >= chunked]
    )


@dataclass(frozen=True, slots=True)
class Division:
    """A batch, divided into sequences that go row by row and long ones that go in chunks.

    counts     arguments of the batch, see `counts_of`; `chunk_counts` those of kernels for chunks
    n_seq      sequences; n_long: those in chunks; n_chunk: chunks of all of them
    only_long  all sequences go in chunks
    runs_rows  the rows kernel has work: rows, or records of long sequences
    fault      where kernels' guards write
    """

    counts: list[jit.Arg]
    n_seq: int
    n_long: int
    n_chunk: int
    only_long: bool
    runs_rows: bool
    fault: Tensor

    @property
    def chunk_counts(self) -> list[jit.Arg]:
        return [*self.counts, self.n_seq]


def divided(
    batch: Batch, layer: StateLayer, n_row: int, chunked: int, chunk: int, fault: Tensor
) -> Division:
    """Divide a batch of `n_row` rows: kept sequences from `chunked` rows on go in chunks of `chunk`."""
    long = chunked_of(batch, chunked)
    only_long = bool(long) and len(long) == len(batch.seqs)
    return Division(
        counts=counts_of(meta_of(batch), layer, n_row, chunked if long else NEVER),
        n_seq=batch.seq_slot.shape[0],
        n_long=len(long),
        n_chunk=sum(-(-s.width // chunk) for s in long),
        only_long=only_long,
        runs_rows=not only_long or any(s.n_fold for s in long),
        fault=fault,
    )
