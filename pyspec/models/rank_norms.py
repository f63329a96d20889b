"""Norms of queries and keys over all heads of a row, of which each rank has some."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda.collective import Collective


class RankNorms:
    """Norms of all heads of q at once, and of all of k: ranks sum their squares. widths: columns of this rank's q and k; whole: of all
    ranks'."""

    def __init__(
        self,
        ranks: Collective,
        weights: tuple[Tensor, Tensor],
        whole: tuple[int, int],
        widths: tuple[int, int],
        eps: float,
    ) -> None:
        self.widths, self.eps, self.ranks = widths, eps, ranks
        self.weights, self.whole = weights, whole
        self.capturable = weights[0].is_cuda  # sums of ranks are torch's on a CPU

    def __call__(self, y: Tensor) -> Tensor:
        """y [row, q | k | v] -> the same, normed."""
        n_q, n_k = self.widths
        q, k, v = y[:, :n_q], y[:, n_q : n_q + n_k], y[:, n_q + n_k :]
        squares = torch.stack([q.square().sum(-1), k.square().sum(-1)], -1)
        squares = self.ranks.sum(squares)
        parts = []
        for i, (x, w) in enumerate(zip((q, k), self.weights, strict=True)):
            parts.append(x * (squares[:, i : i + 1] / self.whole[i] + self.eps).rsqrt() * w)
        return torch.cat([*parts, v], -1)
