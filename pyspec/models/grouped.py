"""A product in groups: every group of a matrix's rows takes its own part of the input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pyspec.cuda.exact import in_passes
from pyspec.cuda.kernel_context import current
from pyspec.cuda.streamed import StreamedParts


class Grouped:
    """Matrices [group, out, in], each of which takes its part of the input: x [row, group * in] f32 -> [row, group * out] f32.

    weight  or a call that unpacks it at each use
    few     the same for few rows, as one product that reads its weights once; or as one matrix [group * out, in]. To that a row's parts are rows
            of their own, and of each part's outputs those of its group count. The other outputs cost nothing while the product waits for
            bytes of weights.
    """

    FEW = 64  # parts of one matrix

    def __init__(
        self,
        weight: Tensor | Callable[[], Tensor],
        few: Callable[[Tensor], Tensor] | StreamedParts | None = None,
    ) -> None:
        self._weight, self.few = weight, few

    @property
    def weight(self) -> Tensor:
        return self._weight if isinstance(self._weight, Tensor) else self._weight()

    def reach(self) -> float:
        """The largest magnitude of an output for a part of norm 1."""
        return max(float(own.float().norm(dim=-1).amax()) for own in self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        n_group, n_out, n_in = (weight := self.weight).shape
        if isinstance(self.few, StreamedParts):
            if len(x) <= self.few.max_rows:
                return self.few(x)
            if current().is_exact:  # the same order of sums, with any rows beside
                return torch.cat([self.few(part) for part in x.split(self.few.max_rows)])
        elif self.few is not None and (current().is_exact or len(x) * n_group <= self.FEW):
            y = self.few(x.reshape(-1, n_in)).view(-1, n_group, n_group, n_out)
            return y.diagonal(dim1=1, dim2=2).transpose(1, 2).flatten(1)
        return in_passes(x, partial(self._all, weight)) if current().is_exact else self._all(weight, x)

    @staticmethod
    def _all(weight: Tensor, x: Tensor) -> Tensor:
        parts = x.view(-1, *weight.shape[::2]).to(weight.dtype)
        return torch.einsum("rgi,goi->rgo", parts, weight).flatten(1).float()
