"""Reference of `norms` in plain torch: norms of rows that stay f32, at the end of a forward and the start of a drafter.

Norms of rows that go into a product are prepared with them (rows_ref.py).
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from pyspec.cpu.tensors import add, picked, scaled, side_by_side
from pyspec.cuda.guard import Guard
from pyspec.cuda.ops.norms.spec import NormsSpec as NormsSpec

GUARD = Guard(9)  # it knows neither the row nor its sequence


class Norms(Protocol):
    """The launch that the op binds. Rows x [row, n] f32, which may be parts of wider rows, a weight [n] f32; a norm's bits depend on its
    row alone."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """[row, n] f32."""
        ...

    def added(self, x: Tensor, weight: Tensor, stream: Tensor, factor: float = 1.0) -> Tensor:
        """(stream + norm(x)) * factor, all [row, n] f32."""
        ...

    def picked(self, x: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """All rows' [row, n], and those of `rows` [out] int64 once more, which is of the batch's layout."""
        ...

    def paired(self, a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor) -> Tensor:
        """[row, 2 n] f32: the norms of two inputs side by side."""
        ...


class TorchNorms:
    """Implements `Norms`."""

    def __init__(self, spec: NormsSpec) -> None:
        self.eps, self.layer = spec.eps, spec.layer

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.layer:
            return F.layer_norm(x, weight.shape, weight, None, self.eps)
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def added(self, x: Tensor, weight: Tensor, stream: Tensor, factor: float = 1.0) -> Tensor:
        return scaled(add(stream, self(x, weight)), factor)

    def picked(self, x: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        y = self(x, weight)
        return y, picked(y, rows)

    def paired(self, a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor) -> Tensor:
        return side_by_side([self(a, a_weight), self(b, b_weight)])


bind = TorchNorms
