"""The MTP block bound to its memory (`mtp.py` has it as data)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pyspec.errors import PairError
from pyspec.models.binding import Pass, bound_at
from pyspec.models.decoder import Decoder
from pyspec.models.matrices import Embedding
from pyspec.models.mtp import EH_PROJ, MtpOfBlock
from pyspec.models.own_vocabulary import BestDrafts
from pyspec.models.ropes import Ropes
from pyspec.models.streams import bound_block, bound_residual
from pyspec.models.target import Matrix, Out, Target
from pyspec.models.wants import EMBEDDING, HEAD
from pyspec.models.weights import Weights
from pyspec.slots.batch import Batch
from pyspec.slots.memory import Memory


class MtpBlock:
    """The block bound to its memory; `head` stands for the target's if it is given. Implements `MtpNet`.

    behind: the blocks of later drafts, whose keys of a row it makes, too: they read the same hidden states as it.
    Its last norm is RMSNorm for every architecture. llama.cpp has LayerNorm there for nemotron_h_moe; other runtimes do not.
    """

    first_key = 0

    def __init__(
        self,
        spec: MtpOfBlock,
        weights: Weights,
        memory: Memory,
        target: Decoder,
        head: Matrix | None,
        skips: tuple[str, ...] = (),
        behind: Sequence[MtpBlock] = (),
    ) -> None:
        p, n, eps = spec.prefix, spec.n_embd, spec.eps
        self.behind = behind
        self.memory, self.n_hidden = memory, spec.residual.n * n
        self.ropes = Ropes(weights, target.ropes)
        at = bound_at(weights, p, spec.n_layer, n, eps, memory.kv_format, self.ropes)
        self.block = bound_block(spec.residual, spec.block, at)
        self.eh: Matrix = weights.matrix(EH_PROJ.format(spec.n_layer))
        self.enorm = weights.vector(f"{p}.nextn.enorm.weight")
        self.hnorm = weights.vector(f"{p}.nextn.hnorm.weight")
        norm = weights.optional(f"{p}.{spec.head_norm}")
        norm = target.norm if norm is None else norm
        self.residual = bound_residual(spec.residual, weights, n, eps, norm, [self.block], at)
        own = _own(spec, weights, "embed_tokens", EMBEDDING, skips)
        self.embedding: Embedding = target.embedding if own is None else weights.embedding(own)
        own = _own(spec, weights, "shared_head_head", HEAD, skips)
        self.output = (head or target.head) if own is None else weights.matrix(own)
        self.best = BestDrafts(weights.device)

    def forward(self, batch: Batch, hidden: Tensor) -> Tensor:
        """hidden [row, n_hidden] f32: that of each row's last position. Returns those of its own."""
        for block in self.behind:
            block.run(batch, hidden)
        return self.run(batch, hidden)

    def run(self, batch: Batch, hidden: Tensor) -> Tensor:
        """The same, without the blocks of later drafts."""
        e, angles = self.ropes.embedded(self.embedding, batch)
        x = self.residual.paired(self.eh, (e, self.enorm), (hidden, self.hnorm))
        given = Pass(angles, self.memory, batch, queries=self.ropes.queries(batch.positions))
        return self.residual.state(self.block.run(x, given))

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


def _own(
    spec: MtpOfBlock, weights: Weights, nextn: str, whole: str, skips: tuple[str, ...]
) -> str | None:
    """The name of the block's own tensor in place of the target's `whole`, if the file has one."""
    names = [f"{spec.prefix}.nextn.{nextn}.weight", *([whole] if spec.stands_alone else [])]
    return next((name for name in names if weights.has(name) and name not in skips), None)


def bound(
    spec: MtpOfBlock,
    weights: Weights,
    memory: Memory,
    target: Target,
    head: Matrix | None,
    skips: tuple[str, ...],
) -> list[MtpBlock]:
    """The blocks by draft. head: stands for the target's if it is given. skips: the result of `MtpOfBlock.shared`."""
    if not isinstance(target, Decoder):
        raise PairError("this target does not give what its MTP block shares with it")
    blocks: list[MtpBlock] = []
    for one in reversed(spec.each):
        blocks.insert(0, MtpBlock(one, weights, memory, target, head, skips, tuple(blocks)))
    return blocks
