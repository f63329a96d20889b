"""Norms of queries and keys over all heads of a row, of which each rank has some."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.models.weights import Weights


class RankNorms:
    """Norms of all heads of q at once, and of all of k: ranks sum their squares. widths: of this rank's q and k."""

    def __init__(self, w: Weights, q: str, k: str, widths: tuple[int, int], eps: float) -> None:
        assert w.ranks is not None, "one rank norms its rows by an op"
        self.widths, self.eps, self.ranks = widths, eps, w.ranks
        self.weights = w.vector(q), w.vector(k)
        self.whole = [w.file.tensors[name].shape[-1] for name in (q, k)]  # of all ranks
        self.capturable = w.device.type != "cpu"  # sums of ranks are torch's there

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
