"""The MTP block behind a model's trunk: a block like the trunk's, over the target's embedding and head.

It pairs a token with the hidden state of the position before it, and chaining feeds its own. In a model of several streams that state is
all of them, as the trunk left them behind its last block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyspec.errors import PairError
from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec
from pyspec.models.part import AttentionShape, Place
from pyspec.models.residual import Residual
from pyspec.models.wants import EMBEDDING, HEAD, Want
from pyspec.slots.parts import LayerParts

PIECE = 1 << 26  # bytes compared at once


@dataclass(frozen=True, slots=True)
class MtpOfBlock:
    """The block behind a trunk of `n_layer` blocks, as data."""

    block: BlockSpec
    residual: Residual
    n_layer: int
    n_vocab: int
    n_embd: int
    eps: float

    @property
    def attention(self) -> tuple[AttentionShape, ...]:
        return self.block.attention

    @property
    def prefix(self) -> str:
        return f"blk.{self.n_layer}"

    @property
    def stands_alone(self) -> bool:
        """True if the block has tensors that have the names of the trunk's. Such a block has a file of its own, in which the model's names
        mean the block's own tensors, embedding and head, too."""
        return bool(self.residual.tensors(self.n_embd))

    def tensors(self, file: GGUFFile, target: GGUFFile) -> dict[str, Want]:
        p, n = self.prefix, self.n_embd
        of_vocab = Want((self.n_vocab, n), optional=True)
        own = self.residual.tensors(n)
        if own and file is target:
            raise PairError(
                "the MTP block stands in the target's file, where the mixers of its head have no place beside the trunk's"
                f" ({next(iter(own))}): give the block's own file with -md, or --spec-type none"
            )
        if own:
            own |= {EMBEDDING: of_vocab, HEAD: of_vocab}
        return {
            **self.block.tensors(self.place(file)),
            **own,
            f"{p}.nextn.eh_proj.weight": Want((n, 2 * n)),
            f"{p}.nextn.enorm.weight": Want((n,)),
            f"{p}.nextn.hnorm.weight": Want((n,)),
            f"{p}.nextn.shared_head_norm.weight": Want((n,), optional=True),
            f"{p}.nextn.embed_tokens.weight": of_vocab,
            f"{p}.nextn.shared_head_head.weight": of_vocab,
        }

    def layers(self) -> tuple[LayerParts, ...]:
        return (*[{}] * self.n_layer, self.block.memory())

    def shared(self, file: GGUFFile, target: GGUFFile) -> tuple[str, ...]:
        names = (EMBEDDING, HEAD) if self.stands_alone else ()
        return tuple(name for name in names if _is_same(file, target, name))

    def place(self, file: GGUFFile) -> Place:
        return Place(file, self.prefix, self.n_embd, self.eps)


def _is_same(a: GGUFFile, b: GGUFFile, name: str) -> bool:
    x, y = a.tensors.get(name), b.tensors.get(name)
    if x is None or y is None or (x.type, x.shape) != (y.type, y.shape):
        return False
    for at in range(0, x.n_bytes, PIECE):
        one, other = (np.empty(min(PIECE, x.n_bytes - at), np.uint8) for _ in range(2))
        a.read_into(name, one, at)
        b.read_into(name, other, at)
        if not np.array_equal(one, other):
            return False
    return True
