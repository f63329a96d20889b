"""Norms of each slice of a row by itself: heads with weights of their own, or a stream in groups."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu import tensors
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec, TorchNorms


class SliceNorms(TorchNorms):
    """RMSNorm of slices of `dim` columns, times weights of all columns. Implements `Norms`."""

    def __init__(self, device: torch.device, dim: int, eps: float) -> None:
        super().__init__(NormsSpec(device, dim, eps))
        self.dim, self.launch = dim, norms.bind(NormsSpec(device, dim, eps))
        self.ones = torch.ones(dim, device=device)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [row, n], contiguous, weight [m]: columns behind the first m, which are whole slices, stay as they are."""
        (n_row, n), m = x.shape, len(weight)
        y = self.launch(x.view(-1, self.dim), self.ones).view(n_row, n)[:, :m]
        y = tensors.gate_times(weight.expand(n_row, m), y, "none")
        return y if m == n else tensors.side_by_side([y, x[:, m:]])
