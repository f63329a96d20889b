"""The MTP block behind a model's trunk: a block like the trunk's, over the target's embedding and head.

It pairs a token with the hidden state of the position before it, and chaining feeds its own. In a model of several streams that state is
all of them, as the trunk left them behind its last block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from pyspec.errors import PairError
from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec
from pyspec.models.kernels import kernels, program_of
from pyspec.models.matrices import Embedding, Matrix
from pyspec.models.own_vocabulary import BestDrafts
from pyspec.models.part import AttentionShape, Binding, LoadTypes, Pass, Place, Request
from pyspec.models.residual import Residual
from pyspec.models.rope import Ropes
from pyspec.models.target import Out, Target
from pyspec.models.wants import Want
from pyspec.models.weights import EMBEDDING, HEAD, Weights
from pyspec.slots.batch import Batch
from pyspec.slots.memory import Memory
from pyspec.slots.parts import LayerParts

PIECE = 1 << 26  # bytes compared at once


@dataclass(frozen=True, slots=True)
class MtpOfBlock:
    """The block behind a trunk of `n_layer` blocks, as data. Implements `MtpSpec`."""

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
            **self.block.tensors(self._place(file)),
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

    def requests(self, file: GGUFFile, on: LoadTypes) -> Iterator[Request]:
        return kernels([program_of(self.block.forward, self._place(file), on)])

    def bind(
        self,
        weights: Weights,
        memory: Memory,
        target: Target,
        head: Matrix | None,
        skips: tuple[str, ...],
    ) -> MtpBlock:
        if not isinstance(target, DecoderParts):
            raise PairError("this target does not give what its MTP block shares with it")
        return MtpBlock(self, weights, memory, target, head, skips)

    def own(self, weights: Weights, nextn: str, whole: str, skips: tuple[str, ...]) -> str | None:
        """The name of the block's own tensor in place of the target's `whole`, if the file has one."""
        names = [f"{self.prefix}.nextn.{nextn}.weight", *([whole] if self.stands_alone else [])]
        return next((name for name in names if weights.has(name) and name not in skips), None)

    def _place(self, file: GGUFFile) -> Place:
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


@runtime_checkable
class DecoderParts(Protocol):
    """The parts of a target that its MTP block shares."""

    ropes: Ropes
    embedding: Embedding
    norm: Tensor

    def head(self, hidden: Tensor) -> Tensor:
        """Normed rows [row, n_embd] to logits [row, n_vocab]."""
        ...


class MtpBlock:
    """The block bound to its memory; `head` stands for the target's if it is given. Implements `MtpNet`.

    Its last norm is RMSNorm for every architecture. llama.cpp has LayerNorm there for nemotron_h_moe; other runtimes do not.
    """

    first_key = 0

    def __init__(
        self,
        spec: MtpOfBlock,
        weights: Weights,
        memory: Memory,
        target: DecoderParts,
        head: Matrix | None,
        skips: tuple[str, ...] = (),
    ) -> None:
        p, n, eps = spec.prefix, spec.n_embd, spec.eps
        self.memory, self.n_hidden = memory, spec.residual.n * n
        self.ropes = Ropes(weights, target.ropes)
        at = Binding(weights, p, spec.n_layer, "", n, eps, memory.kv_format, self.ropes)
        self.block = spec.residual.bind_block(spec.block, at)
        self.eh: Matrix = weights.matrix(f"{p}.nextn.eh_proj.weight")
        self.enorm, self.hnorm = (
            weights.vector(f"{p}.nextn.enorm.weight"),
            weights.vector(f"{p}.nextn.hnorm.weight"),
        )
        norm = weights.optional(f"{p}.nextn.shared_head_norm.weight")
        self.residual = spec.residual.bind(weights, n, eps, target.norm if norm is None else norm)
        own = spec.own(weights, "embed_tokens", EMBEDDING, skips)
        self.embedding: Embedding = target.embedding if own is None else weights.embedding(own)
        own = spec.own(weights, "shared_head_head", HEAD, skips)
        self.output = (head or target.head) if own is None else weights.matrix(own)
        self.best = BestDrafts(weights.device)

    def forward(self, batch: Batch, hidden: Tensor) -> Tensor:
        """hidden [row, n_hidden] f32: that of each row's last position. Returns those of its own."""
        e, angles = self.ropes.embedded(self.embedding, batch.tokens, batch.positions)
        x = self.residual.paired(self.eh, (e, self.enorm), (hidden, self.hnorm))
        given = Pass(angles, self.memory, batch, queries=self.ropes.queries(batch.positions))
        (x,) = self.residual.through(x, [self.block], given)
        return self.residual.state(x)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [row, vocab] of hidden states that `forward` made."""
        return self.output(self.residual.headed(hidden))

    def propose(self, hidden: Tensor, out: Tensor) -> Tensor:
        """The block's vocabulary is the target's."""
        logits = self.head(hidden)
        self.best(logits, out)
        return logits

    def states_of(self, out: Out) -> Tensor:
        """The block reads the target's hidden states as they are."""
        return out.hidden
