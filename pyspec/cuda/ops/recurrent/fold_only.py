"""Fold a slot's records without new rows, with the kernels that fold before rows. Both recurrences share this."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda.context import per_device

FOLD_ONLY = 2  # in seq_keep: see seq.cuh


@per_device
def fold_batch(device: torch.device, slot: int, n_fold: int) -> tuple[Tensor, ...]:
    """(slot, start, fold, keep) of one sequence without rows, int32."""
    values = torch.tensor([slot, 0, 0, n_fold, FOLD_ONLY], dtype=torch.int32, device=device)
    return values.split([1, 2, 1, 1])
