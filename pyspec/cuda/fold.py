"""Fold a slot's records now, for any recurrence, so that its state stands at its committed length."""

from __future__ import annotations

from pyspec.cuda.ops.gdn import ref as gdn_ref
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.mamba2 import ref as mamba2_ref
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.slots.recurrent import StateLayer

FOLDS = {GdnShape: gdn_ref.flush, Mamba2Shape: mamba2_ref.flush}


def flush(layer: StateLayer, slot: int, n_fold: int) -> None:
    fold = layer.fold or FOLDS[type(layer.shape)]
    fold(layer, slot, n_fold)
