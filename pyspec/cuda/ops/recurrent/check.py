"""Rounds of a recurrence's check: ragged batches with every mode of a sequence, on an implementation and on the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyspec.slots.batch import Batch, Seq, SeqMode, lay_out
from pyspec.slots.parts import RecurrentShape
from pyspec.slots.recurrent import StateLayer
from pyspec.slots.table import SlotTable

Rounds = Sequence[Sequence[Seq]]

LATE_ROUNDS: Rounds = (  # rounds of a check: rows wait as records, then a row, a verify or a kept row folds them; slots 0 and 2 have none before
    [Seq(0, 20, [0], mode=SeqMode.LATE), Seq(2, 20, [0], mode=SeqMode.LATE)],
    [Seq(0, 21, [0], n_fold=1, mode=SeqMode.LATE), Seq(2, 21, [0] * 2, n_fold=1)],
    [Seq(0, 22, [0], n_fold=2, mode=SeqMode.LATE), Seq(2, 23, [0], n_fold=2, mode=SeqMode.LATE)],
    [Seq(0, 23, [0], SeqMode.KEEP, n_fold=3), Seq(2, 24, [0] * 3, n_fold=3)],
)
ROUNDS: Rounds = (
    [Seq(0, 0, [0] * 5, SeqMode.KEEP), Seq(2, 0, [0], SeqMode.KEEP)],
    [Seq(0, 5, [0] * 6), Seq(2, 1, [0] * 3)],
    [
        Seq(2, 4, [0], SeqMode.VERIFY, 0, 3),
        Seq(0, 8, [0] * 2, SeqMode.VERIFY, 0, 3),
        Seq(1, 0, [0] * 4, SeqMode.KEEP),
    ],
    [Seq(0, 10, [0], SeqMode.KEEP, 0, 1), Seq(2, 5, [0] * 4, SeqMode.KEEP, 0, 1)],
    *LATE_ROUNDS,
    [Seq(1, 4, [0] * 3), Seq(0, 11, [0] * 130, SeqMode.KEEP)],
)


def prompts(*widths: int) -> Sequence[Seq]:
    """The last round: long rows of slots 1 and 2, of which the first folds records, beside a verify."""
    first, second = ([0] * width for width in widths)
    return [Seq(1, 7, first, SeqMode.KEEP, 0, 2), Seq(2, 9, second, SeqMode.KEEP), Seq(0, 141, [0] * 2)]


def run_rounds(
    runs: Sequence[Callable[..., Tensor]],
    layers: Sequence[StateLayer],
    last: Sequence[Seq],
    drawn: Callable[[int], Sequence[Any]],
    parted: Callable[[Tensor, Tensor, Batch], str | None],
) -> str | None:
    """Run an implementation and the reference, each on its own layer; the first sentence of `parted` (its outputs, theirs, batch).

    drawn(n)  the arguments of a call with n rows, in front of layer and batch
    """
    tables = [SlotTable(3, 32, 16) for _ in runs]
    for seqs in (*ROUNDS, last):
        given = drawn(sum(seq.width for seq in seqs))
        batches = [lay_out(table, seqs, layers[0].state.device) for table in tables]
        got, want = (
            run(*given, layer, batch) for run, layer, batch in zip(runs, layers, batches, strict=True)
        )
        if why := parted(got, want, batches[0]):
            return why
    return None


def layers_of(shape: RecurrentShape, device: torch.device) -> list[StateLayer]:
    """One for each of the two."""
    return [StateLayer(shape, 3, 6, device) for _ in range(2)]
