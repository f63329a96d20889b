"""Norms of each slice of a row by itself: heads with weights of their own, or a stream in groups."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu import tensors
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.spec import NormsSpec


class SliceNorms:
    """RMSNorm of slices of `dim` columns, times weights of all columns. Implements `Norms`."""

    def __init__(self, device: torch.device, dim: int, eps: float) -> None:
        self.dim, self.launch = dim, norms.bind(NormsSpec(device, dim, eps))
        self.ones = torch.ones(dim, device=device)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [row, n], contiguous, weight [m]: columns behind the first m, which are whole slices, stay as they are."""
        (n_row, n), m = x.shape, len(weight)
        y = self.launch(x.view(-1, self.dim), self.ones).view(n_row, n)[:, :m]
        y = tensors.gate_times(weight.expand(n_row, m), y, "none")
        return y if m == n else tensors.side_by_side([y, x[:, m:]])

    def added(self, x: Tensor, weight: Tensor, stream: Tensor, factor: float = 1.0) -> Tensor:
        return tensors.scaled(tensors.add(stream, self(x, weight)), factor)

    def paired(self, a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor) -> Tensor:
        return tensors.side_by_side([self(a, a_weight), self(b, b_weight)])

    def picked(self, x: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        y = self(x, weight)
        return y, tensors.picked(y, rows)
