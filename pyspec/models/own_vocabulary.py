"""The tokens that a drafter's block proposes, in the target's vocabulary. The block's own may be a smaller one, in another order."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda.ops.best.op import best
from pyspec.cuda.ops.best.ref import BestSpec
from pyspec.errors import PairError
from pyspec.gguf import GGMLType, GGUFFile
from pyspec.models.wants import EMBEDDING, HEAD, WHOLE
from pyspec.models.weights import PLAIN, Weights

D2T = "d2t"  # of a head with fewer tokens than the target: which of the target's each is
PLAIN_NUMBERS = (*PLAIN, *WHOLE, GGMLType.F64)


def check_own(file: GGUFFile, n_vocab: int) -> None:
    """Refuse an embedding or a head of a drafter's own that does not read and give the target's `n_vocab` tokens."""
    embedding, head, d2t = (file.tensors.get(name) for name in (EMBEDDING, HEAD, D2T))
    if embedding is not None and embedding.shape[0] < n_vocab:
        raise PairError(f"the drafter embeds {embedding.shape[0]} tokens; the target has {n_vocab}")
    n_head = n_vocab if head is None else head.shape[0]
    if d2t is None and n_head > n_vocab:
        raise PairError(
            f"the drafter's head gives {n_head} tokens; the target has {n_vocab}, and there is no {D2T}"
        )
    if d2t is not None and (d2t.shape != (n_head,) or d2t.type not in PLAIN_NUMBERS):
        raise PairError(
            f"the drafter's {D2T} is {list(d2t.shape)} of type {d2t.type.name}; "
            f"want plain numbers, one for each of its head's {n_head} tokens"
        )


def read_d2t(w: Weights, n_vocab: int) -> Tensor | None:
    """[token of the drafter's head] int64: the target's token it stands for; None if both are the same."""
    if not w.has(D2T):
        return None
    ids = w.vector(D2T)
    if not bool(((ids >= 0) & (ids < n_vocab)).all()):  # NaN is neither
        raise PairError(
            f"the drafter's {D2T} goes from {ids.min():g} to {ids.max():g}; the target has tokens 0..{n_vocab - 1}"
        )
    return ids.long()


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
