"""A decoder of one residual stream: runs the blocks of a `ModelSpec`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.models.bound import BoundModel
from pyspec.models.part import Binding, Pass
from pyspec.models.rope import Ropes
from pyspec.models.spec import ModelSpec
from pyspec.models.weights import Weights
from pyspec.slots.batch import Batch
from pyspec.slots.memory import Memory


class Decoder(BoundModel):
    """The model bound to its memory. Implements `Target`."""

    def __init__(self, config: ModelSpec, weights: Weights, memory: Memory) -> None:
        super().__init__(config, weights, memory, config.embed_factor, config.final_cap)
        own, kv = config.share(weights.n_rank), memory.kv_format
        self.ropes = Ropes(weights)
        self.blocks = [
            block.bind(Binding(weights, f"blk.{i}", i, "", own.n_embd, own.eps, kv, self.ropes))
            for i, block in enumerate(own.blocks)
        ]
        if self.ranks is not None:
            steps = [step for block in self.blocks for step in block.steps]
            fuse.link(self.ranks, [(last.gives, next.part.reads) for last, next in pairwise(steps)])
        for i, state in memory.states.items():
            state.fold = self.blocks[i].fold
        self.norm = weights.vector("output_norm.weight")
        self.norms = norms.bind(NormsSpec(weights.device, config.n_embd, config.eps))
        self.output = weights.head()

    @property
    def capturable(self) -> bool:
        """True if a CUDA graph may hold a forward."""
        may = self.ranks is None or self.ranks.capturable
        return may and all(block.capturable for block in self.blocks)

    @property
    def captures_prompts(self) -> bool:
        """True if one may hold that of a prompt that stands alone."""
        return self.ranks is None and not current().is_exact and all(block.captures_prompts for block in self.blocks)

    def trunk(self, batch: Batch, taps: Sequence[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
        x, angles = self.ropes.embedded(self.embedding, batch.tokens, batch.positions)
        given = Pass(angles, self.memory, batch)
        tapped: dict[int, Tensor] = {}
        for i, block in enumerate(self.blocks):
            x = block(x, given)
            if i in taps:
                tapped[i] = x
        hidden, wanted = self.norms.picked(x, self.norm, batch.out_rows)
        return hidden, wanted, [tapped[i] for i in taps]
