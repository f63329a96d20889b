"""The MTP block behind a model's trunk: a block like the trunk's, over the target's embedding and head.

It pairs a token with the hidden state of the position before it, and chaining feeds its own. In a model of several streams that state is
all of them, as the trunk left them behind its last block.

A model may have a block for each token of a draft (`step35`), one behind the other in the file. The k-th one makes draft k, of the hidden
state that the one before made. Rows of the text are the trunk's hidden states in all of them, as in llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pyspec.errors import PairError
from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec
from pyspec.models.part import AttentionShape, Place
from pyspec.models.residual import Residual
from pyspec.models.wants import EMBEDDING, HEAD, Want
from pyspec.slots.parts import LayerParts

HEAD_NORM = "nextn.shared_head_norm.weight"
EH_PROJ = "blk.{}.nextn.eh_proj.weight"
PIECE = 1 << 26  # bytes compared at once


@dataclass(frozen=True, slots=True)
class MtpOfBlock:
    """The block behind `n_layer` others, as data.

    head_norm  the norm before its head, where the file has it
    more       the blocks of the drafts behind the first one
    """

    block: BlockSpec
    residual: Residual
    n_layer: int
    n_vocab: int
    n_embd: int
    eps: float
    head_norm: str = HEAD_NORM
    more: tuple[BlockSpec, ...] = ()

    @property
    def each(self) -> tuple[MtpOfBlock, ...]:
        """The blocks by draft, each with the next ones behind it."""
        if not self.more:
            return (self,)
        first, *others = self.more
        return self, *replace(self, block=first, n_layer=self.n_layer + 1, more=tuple(others)).each

    def in_file(self, file: GGUFFile, most: int) -> MtpOfBlock:
        """Without blocks that this file does not have, and those behind the first `most`."""
        n = min(most, sum(EH_PROJ.format(one.n_layer) in file.tensors for one in self.each))
        return replace(self, more=self.more[: max(0, n - 1)])

    @property
    def attention(self) -> tuple[AttentionShape, ...]:
        shapes = (shape for one in self.each for shape in one.block.attention)
        return tuple(dict.fromkeys(shapes))

    @property
    def prefix(self) -> str:
        return f"blk.{self.n_layer}"

    @property
    def stands_alone(self) -> bool:
        """True if the block has tensors that have the names of the trunk's. Such a block has a file of its own, in which the model's names
        mean the block's own tensors, embedding and head, too."""
        return self.residual.n_iter is not None

    def tensors(self, file: GGUFFile, target: GGUFFile) -> dict[str, Want]:
        return {k: v for one in self.each for k, v in one._tensors(file, target).items()}

    def _tensors(self, file: GGUFFile, target: GGUFFile) -> dict[str, Want]:
        p, n = self.prefix, self.n_embd
        of_vocab = Want((self.n_vocab, n), optional=True)
        own = self.residual.tensors(n) if self.stands_alone else {}
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
            EH_PROJ.format(self.n_layer): Want((n, 2 * n)),
            f"{p}.nextn.enorm.weight": Want((n,)),
            **self._norms(file),
            f"{p}.nextn.embed_tokens.weight": of_vocab,
            f"{p}.nextn.shared_head_head.weight": of_vocab,
        }

    def _norms(self, file: GGUFFile) -> dict[str, Want]:
        """Of hidden states, before the block and behind it."""
        n, at = self.n_embd, self.place(file)
        before, behind = at.name("nextn.hnorm.weight"), at.name(self.head_norm)
        if self.residual.gates is None:
            return {before: Want((n,)), behind: Want((n,), optional=True)}
        if behind in file.tensors:
            raise PairError(
                f"{behind}: a block between gated streams ends with gates of its own, and no norm"
            )
        n_stream = self.residual.n
        own = {at.name(name): want for name, want in self.residual.tensors(n).items()}
        return own | {before: Want((n_stream, n), also=((n_stream * n,), (n,)))}

    def layers(self) -> tuple[LayerParts, ...]:
        return (*[{}] * self.n_layer, *(one.block.memory() for one in self.each))

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
