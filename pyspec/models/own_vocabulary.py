"""The tokens that a drafter's block proposes, in the target's vocabulary. The block's own may be a smaller one, in another order."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda.ops.best.op import best
from pyspec.cuda.ops.best.ref import BestSpec


class BestDrafts:
    """The best token of each row of logits, as one of the target's.

    to_target  [own token] int64: the target's token for each column of the logits; None: they are the target's
    """

    def __init__(self, device: torch.device, to_target: Tensor | None = None) -> None:
        self.best, self.to_target = best.bind(BestSpec(device)), to_target

    def __call__(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """logits [row, own token] f32 -> [row] int64, in `out` if it is given."""
        if self.to_target is None:
            return self.best.tokens(logits, out=out)
        return torch.index_select(self.to_target, 0, self.best.tokens(logits), out=out)

    def mapped(self, tokens: Tensor) -> Tensor:
        """The target's tokens for the block's own, [row] int64 both."""
        return tokens if self.to_target is None else self.to_target[tokens]
