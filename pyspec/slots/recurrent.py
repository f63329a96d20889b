"""Recurrent state of every slot, with the records of rows that are not folded yet. A state row is written only by its slot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from pyspec.slots.mapped import zeros
from pyspec.slots.parts import RecurrentShape

LATE_ROWS = 3  # single rows recorded before a slot's state is written again; more cost as much in folding as they save (docs/log.md)


def late_rows(device: torch.device) -> int:
    """Single rows of a slot that may wait in records while it decodes. On a CPU, folding them again costs more than a write."""
    return LATE_ROWS if device.type == "cuda" else 0


class StateLayer:
    """Recurrent state of one layer for every slot, committed by folding.

    state  [slot, *shape.state]         f32  after the committed, folded tokens
    conv   [slot, taps - 1 + width, ch] f32  rows 0..taps-2: the last raw inputs before the fold point; then the raw inputs
                                             of the slot's last verify
    NAME   [slot, width, *dims]         f32  for each of shape.records: records of the last verify, or of rows since the state was
                                             written (SeqMode.LATE)

    A verify only writes records. The next forward of the slot folds the accepted ones into `state`, in order, and shifts `conv` by as
    many: rolling back means folding fewer, without a copy (deferred commit). Single rows that are final may wait there, too, because
    writing the state costs as much as all other memory of a row.

    Records are attributes with the names of the shape. A recurrence's kernels know their own names, and an attribute is as fast to look up
    as the state, once per layer and round.
    """

    paged: ClassVar[bool] = False

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor:
            """A record."""
            ...

    def __init__(self, shape: RecurrentShape, n_slot: int, width: int, device: torch.device) -> None:
        made = partial(zeros, dtype=torch.float32, device=device)
        self.shape, self.width = shape, width
        self.fold: Callable[[StateLayer, int, int], None] = (
            _unbound  # (this, slot, n): with the layer's kernels
        )
        self.state = made((n_slot, *shape.state))
        self.conv = made((n_slot, shape.n_conv - 1 + width, shape.n_channel))
        for name, dims in shape.records.items():
            assert not hasattr(self, name), f"a record can not be called {name}: every layer has that"
            setattr(self, name, made((n_slot, width, *dims)))

    def records(self) -> tuple[Tensor, ...]:
        """Inputs of rows that are not folded yet, in the order of the shape."""
        return tuple(getattr(self, name) for name in self.shape.records)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.state, self.conv, *self.records()

    def page(self, page: int, page_size: int) -> tuple[Tensor, ...]:
        return ()

    def saved(self, slot: int, n_past: int) -> tuple[Tensor, ...]:
        """State and window at `n_past` tokens, if nothing is left to fold."""
        return self.state[slot], self.conv[slot, : self.shape.n_conv - 1]

    def own(self, slot: int) -> tuple[Tensor, ...]:
        """State and window. Without a fold count, records are unused."""
        return self.state[slot], self.conv[slot]


def _unbound(layer: StateLayer, slot: int, n_fold: int) -> None:
    raise AssertionError("no layer of a model is bound to this state")
