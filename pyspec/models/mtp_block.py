"""The MTP block of a decoder of one residual stream: a block like the trunk's, over the target's embedding and head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.errors import PairError
from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec
from pyspec.models.own_vocabulary import BestDrafts
from pyspec.models.part import AttentionShape, Binding, LoadTypes, Pass, Place, Request
from pyspec.models.rope import Ropes
from pyspec.models.target import Out, Target
from pyspec.models.wants import Want
from pyspec.models.weights import Embedding, Matrix, Weights
from pyspec.slots.batch import Batch
from pyspec.slots.memory import Memory
from pyspec.slots.parts import LayerParts


@dataclass(frozen=True, slots=True)
class MtpOfBlock:
    """The block behind a trunk of `n_layer` blocks, as data. Implements `MtpSpec`."""

    block: BlockSpec
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

    def tensors(self, file: GGUFFile, target: GGUFFile) -> dict[str, Want]:
        p, n = self.prefix, self.n_embd
        return {
            **self.block.tensors(self._place(file)),
            f"{p}.nextn.eh_proj.weight": Want((n, 2 * n)),
            f"{p}.nextn.enorm.weight": Want((n,)),
            f"{p}.nextn.hnorm.weight": Want((n,)),
            f"{p}.nextn.shared_head_norm.weight": Want((n,), optional=True),
            f"{p}.nextn.embed_tokens.weight": Want((self.n_vocab, n), optional=True),
            f"{p}.nextn.shared_head_head.weight": Want((self.n_vocab, n), optional=True),
        }

    def layers(self) -> tuple[LayerParts, ...]:
        return (*[{}] * self.n_layer, self.block.memory())

    def shared(self, file: GGUFFile, target: GGUFFile) -> tuple[str, ...]:
        return ()

    def requests(self, file: GGUFFile, on: LoadTypes) -> Iterator[Request]:
        return self.block.requests(self._place(file), on)

    def bind(
        self, weights: Weights, memory: Memory, target: Target, head: Matrix | None, skips: tuple[str, ...]
    ) -> MtpBlock:
        if not isinstance(target, DecoderParts):
            raise PairError("this target does not give what its MTP block shares with it")
        return MtpBlock(self, weights, memory, target, head)

    def _place(self, file: GGUFFile) -> Place:
        return Place(file, self.prefix, self.n_embd, self.eps)


@runtime_checkable
class DecoderParts(Protocol):
    """The parts of a target that its MTP block shares."""

    ropes: Ropes
    embedding: Embedding
    norm: Tensor

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [row, n_embd] to logits [row, n_vocab]."""
        ...


class MtpBlock:
    """The block bound to its memory; `head` stands for the target's if it is given. Implements `MtpNet`.

    Its last norm is RMSNorm for every architecture. llama.cpp has LayerNorm there for nemotron_h_moe; other runtimes do not.
    """

    def __init__(
        self, spec: MtpOfBlock, weights: Weights, memory: Memory, target: DecoderParts, head: Matrix | None
    ) -> None:
        p, eps = spec.prefix, spec.eps
        self.memory, self.n_hidden = memory, spec.n_embd
        self.ropes = Ropes(weights, target.ropes)
        at = Binding(weights, p, spec.n_layer, "", spec.n_embd, eps, memory.kv_format, self.ropes)
        self.block = spec.block.bind(at)
        self.eh: Matrix = weights.matrix(f"{p}.nextn.eh_proj.weight")
        self.enorm, self.hnorm = weights.vector(f"{p}.nextn.enorm.weight"), weights.vector(f"{p}.nextn.hnorm.weight")
        norm = weights.optional(f"{p}.nextn.shared_head_norm.weight")
        self.norm = target.norm if norm is None else norm
        self.norms = self.last_norm = norms.bind(NormsSpec(weights.device, spec.n_embd, eps))
        own = f"{p}.nextn.embed_tokens.weight"
        self.embedding: Embedding = weights.embedding(own) if weights.has(own) else target.embedding
        own = f"{p}.nextn.shared_head_head.weight"
        self.head = weights.matrix(own) if weights.has(own) else head or target.head
        self.best = BestDrafts(weights.device)

    def forward(self, batch: Batch, hidden: Tensor) -> Tensor:
        """hidden [row, n_embd] f32: h_{p-1} of each row. Returns the post-norm output [row, n_embd]."""
        e, angles = self.ropes.embedded(self.embedding, batch.tokens, batch.positions)
        x = self.eh(self.norms.paired(e, self.enorm, hidden, self.hnorm))
        x = self.block(x, Pass(angles, self.memory, batch))
        return self.last_norm(x, self.norm)

    def propose(self, hidden: Tensor, out: Tensor) -> Tensor:
        """The block's vocabulary is the target's."""
        logits = self.head(hidden)
        self.best(logits, out)
        return logits

    def states_of(self, out: Out) -> Tensor:
        """The block reads the target's hidden states as they are."""
        return out.hidden
