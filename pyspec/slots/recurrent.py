"""Recurrent state of every slot, with the records that a verify leaves to be folded in. A state row is written only by its slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

import torch
from torch import Tensor

LATE_ROWS = 3  # of a slot that are recorded before its state is written again; more cost as much in folding as they spare (docs/log.md)


def late_rows(device: torch.device) -> int:
    """Single rows of a slot that may wait in its records while it decodes. On a CPU folding them again costs more than a write."""
    return LATE_ROWS if device.type == "cuda" else 0


class RecurrentShape(Protocol):
    """What one recurrent layer keeps for a slot, whatever its recurrence."""

    def share(self, n: int) -> Self:
        """What each of `n` ranks keeps, if they divide the heads."""
        ...

    @property
    def n_conv(self) -> int:
        """Taps of the convolution."""
        ...

    @property
    def n_channel(self) -> int:
        """Channels of the convolution."""
        ...

    @property
    def state(self) -> tuple[int, ...]:
        """Dimensions of the state."""
        ...

    @property
    def records(self) -> Mapping[str, tuple[int, ...]]:
        """Dimensions of what a verify records of each row, by name: enough to fold the row later."""
        ...


class StateLayer:
    """Recurrent state of one layer for every slot, committed by folding.

    state  [slot, *shape.state]         f32  after the committed, folded tokens
    conv   [slot, taps - 1 + width, ch] f32  rows 0..taps-2: the last raw inputs before the fold point; then the raw inputs
                                             of the slot's last verify
    NAME   [slot, width, *dims]         f32  for each of shape.records: records of the last verify, or of rows that came since the
                                             state was written (Seq.late)

    A verify only writes records. The next forward of the slot folds the accepted ones into `state`, in order, and shifts
    `conv` by as many: rolling back is folding fewer, so it copies nothing (spec: deferred commit). Single rows of which every one is
    kept wait there, too, for a state is as large as all that is read of it, and need not be written for each.

    Records are attributes by the names that the shape gives them: the kernels of a recurrence know their own, nobody knows all,
    and a launch, once per layer and round, looks them up as fast as the state.
    """

    paged: ClassVar[bool] = False

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor:
            """A record."""
            ...

    def __init__(self, shape: RecurrentShape, n_slot: int, width: int, device: torch.device) -> None:
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)
        self.shape, self.width = shape, width
        self.fold: Callable[[StateLayer, int, int], None] | None = None  # (this, slot, n): what its kernels fold with
        self.state = zeros((n_slot, *shape.state))
        self.conv = zeros((n_slot, shape.n_conv - 1 + width, shape.n_channel))
        for name, dims in shape.records.items():
            assert not hasattr(self, name), f"a record can not be called {name}: every layer has that"
            setattr(self, name, zeros((n_slot, width, *dims)))

    def records(self) -> tuple[Tensor, ...]:
        """Inputs of rows that are not folded yet, in the order of the shape."""
        return tuple(getattr(self, name) for name in self.shape.records)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.state, self.conv, *self.records()

    def page(self, page: int, page_size: int) -> tuple[Tensor, ...]:
        return ()

    def saved(self, slot: int, n_past: int) -> tuple[Tensor, ...]:
        """State and window, which stand at `n_past` tokens when nothing is left to fold."""
        return self.state[slot], self.conv[slot, : self.shape.n_conv - 1]

    def own(self, slot: int) -> tuple[Tensor, ...]:
        """State and window. Records are dead without a fold count."""
        return self.state[slot], self.conv[slot]
