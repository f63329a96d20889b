"""What ranks have in parts: a matrix of which each has some rows (a head), whose outputs are brought together only where all of them are
read, and norms over all heads of a row.

Most rounds want each row's best token and no more. For that every rank finds the best of its own columns, and sends a
few bytes a row to the others instead of a row over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyspec.cpu import tensors
from pyspec.cuda.collective import Collective
from pyspec.cuda.ops.best.op import best
from pyspec.cuda.ops.best.ref import BestSpec
from pyspec.cuda.ops.rows.ref import Prep
from pyspec.models.target import Matrix, Out
from pyspec.slots.round import LogitsNeed

KEPT = 64  # sets of banned tokens that are kept on the device


class Gathered:
    """Of `widths` rows on each rank; called, it gives the outputs of all of them, side by side on every rank.

    own  this rank's part
    """

    def __init__(self, own: Matrix, ranks: Collective, widths: Sequence[int]) -> None:
        self.own, self.ranks, self.widths = own, ranks, widths
        self.first = sum(widths[: ranks.rank.index])  # of this rank's columns
        self._best = best.bind(BestSpec(ranks.device))
        self._banned: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, x: Tensor, prep: Prep | None = None, residual: Tensor | None = None) -> Tensor:
        y = self.together(self.own(x, prep))
        return y if residual is None else residual + y

    def together(self, columns: Tensor) -> Tensor:
        """Every rank's columns side by side; these are our own."""
        return self.ranks.columns(columns, self.widths)

    def left_out(self, columns: Tensor) -> Tensor:
        """A meta tensor of that shape, so that an accidental read fails."""
        return torch.empty(columns.shape[0], sum(self.widths), dtype=columns.dtype, device="meta")

    def best(self, columns: Tensor) -> Tensor:
        """[2, row] f64 on every rank: the pairs that the op `best` makes of all columns; `columns` are our own.

        Ranks have ascending columns: of equal values the first rank's is the lowest, and of several that are no number the first.
        """
        own = self._best.pairs(columns)
        if self.first:
            own[0] += self.first
        found = self.ranks.stacked(own)
        rank = found[:, 1].argmax(0)
        return found.gather(0, rank.expand(1, 2, -1)).squeeze(0)

    def largest(self, values: Tensor, columns: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The n largest of each row, and their columns, both [row, n] on every rank: of this rank's [row, up to n], and of the others'.

        values f32, columns int64 of this rank's own.
        """
        own = torch.stack([values.double(), (columns + self.first).double()])
        # the last rank may have fewer columns
        own = torch.nn.functional.pad(own, (0, n - own.shape[2]), value=-torch.inf)
        values, columns = self.ranks.stacked(own).permute(1, 2, 0, 3).flatten(2)
        best, at = values.topk(n)
        return best.float(), columns.gather(1, at).long()

    @torch.inference_mode()
    def best_but(self, columns: Tensor, bans: tuple[int, ...]) -> Tensor:
        """The same without tokens that are banned, whose columns are lost."""
        if bans not in self._banned:
            if len(self._banned) >= KEPT:
                self._banned.clear()
            own = [token - self.first for token in bans if 0 <= token - self.first < columns.shape[1]]
            self._banned[bans] = torch.tensor(own, dtype=torch.int64, device=columns.device)
        if len(here := self._banned[bans]):
            columns.index_fill_(1, here, -torch.inf)
        return self.best(columns)

    def whole(self, out: Out, reads: LogitsNeed) -> Out:
        """As `Out.whole`, of results that have this rank's columns."""
        if reads.logits:
            return replace(out, logits=self.together(out.logits), head=None)
        best = self.best_but(out.logits, reads.bans) if reads.bans else out.best
        return replace(out, logits=self.left_out(out.logits), best=best, head=None)


def shared(matrix: object) -> Gathered | None:
    """The matrix if ranks bring its outputs together, else None."""
    return matrix if isinstance(matrix, Gathered) else None


@dataclass(frozen=True, slots=True)
class Bend:
    """What happens to logits behind the head: a factor, then c tanh(logits / c) unless c is 0."""

    factor: float = 1.0
    cap: float = 0.0

    def __call__(self, logits: Tensor) -> Tensor:
        return tensors.capped(tensors.scaled(logits, self.factor), self.cap)


def out_of(output: Matrix, wanted: Tensor, hidden: Tensor, taps: Tensor | None, bent: Bend) -> Out:
    """Results whose logits are those of the rows `wanted`, bent. Of several ranks they are this one's columns until `whole` is called."""
    head = shared(output)
    if head is None:
        return Out(bent(output(wanted)), hidden, taps)
    columns = bent(head.own(wanted))
    return Out(columns, hidden, taps, head.best(columns), head.whole)


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
