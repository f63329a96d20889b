"""A model bound to its memory: one decoder runs every model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyspec.cpu import tensors
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.spec import NormsSpec
from pyspec.models.binding import Binding, Pass
from pyspec.models.bound import Block, link_reads, link_sums
from pyspec.models.gathered import Bend, out_of
from pyspec.models.model import ModelSpec
from pyspec.models.per_layer import NORM, PRODUCT, PerLayer
from pyspec.models.ringed import Ringed
from pyspec.models.ropes import Angles, Ropes
from pyspec.models.streams import bound_block, bound_residual
from pyspec.models.tables import Tables
from pyspec.models.target import Lead, Out
from pyspec.models.wants import EMBEDDING, TOKEN_INPUTS
from pyspec.models.weights import Weights
from pyspec.slots.arena import PROMPTS
from pyspec.slots.batch import Batch
from pyspec.slots.memory import Memory


class BoundPerLayer:
    """Inputs of blocks besides the stream (`per_layer.py`), bound to a model's weights."""

    def __init__(self, spec: PerLayer, w: Weights) -> None:
        self.spec = spec
        self.table = w.embedding(TOKEN_INPUTS, spec.n**0.5)
        self.product, self.weight = w.matrix(PRODUCT), w.vector(NORM)
        self.norm = norms.bind(NormsSpec(w.device, spec.n, spec.eps))
        self.capturable = norms.chosen(NormsSpec(w.device, spec.n, spec.eps)).capturable

    def __call__(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Of tokens [row] int64, whose rows of the embedding are x [row, n_embd] f32. [row, n_layer, n] f32"""
        s, n_row = self.spec, len(tokens)
        of_stream = tensors.scaled(self.product(x), s.n_embd**-0.5).view(n_row * s.n_layer, s.n)
        both = tensors.add(
            self.norm(of_stream, self.weight), self.table(tokens).view(n_row * s.n_layer, s.n)
        )
        return tensors.scaled(both, 0.5**0.5).view(n_row, s.n_layer, s.n)


class Decoder:
    """Implements `Target`. Tensors are bound in the order of the file."""

    def __init__(self, config: ModelSpec, weights: Weights, memory: Memory) -> None:
        own, kv = config.share(weights.n_rank), memory.kv_format
        self.config, self.memory, self.device, self.ranks = config, memory, weights.device, weights.ranks
        self.n_vocab, self.n_embd, self.n_layer = config.n_vocab, config.n_embd, config.n_layer
        self.lead: Lead | None = None
        self.embedding = weights.embedding(EMBEDDING, config.embed_factor)
        self.inputs = None if config.per_layer is None else BoundPerLayer(config.per_layer, weights)
        self.ropes, self.tables = Ropes(weights), Tables()
        self.ringed = Ringed(memory, weights.device)
        self.blocks = [
            bound_block(
                config.residual,
                block,
                Binding(weights, f"blk.{i}", i, "", own.n_embd, own.eps, kv, self.ropes, self.tables),
            )
            for i, block in enumerate(own.blocks)
        ]
        self.tables.close()
        plain = [block for block in self.blocks if isinstance(block, Block)]
        link_reads(plain)
        if self.ranks is not None:
            link_sums(self.ranks, plain)
        for i, state in memory.states.items():
            state.fold = self.blocks[i].fold
        self.norm = weights.vector(config.last_norm)
        self.residual = bound_residual(
            config.residual, weights, config.n_embd, config.eps, self.norm, self.blocks
        )
        self.output, self.bent = weights.head(), Bend(config.logit_factor, config.final_cap)

    @property
    def capturable(self) -> bool:
        """True if a CUDA graph may hold a forward."""
        may = self.ranks is None or self.ranks.capturable
        may = may and (self.inputs is None or self.inputs.capturable) and self.ringed.capturable
        return may and self.residual.capturable and all(block.capturable for block in self.blocks)

    @property
    def most_captured_prompt(self) -> int:
        """Rows of the longest prompt whose forward one may hold, if it stands alone; 0: none."""
        if current().is_exact or not all(block.captures_prompts for block in self.blocks):
            return 0
        # NCCL's sums of many rows are left out of graphs
        return PROMPTS[-1] if self.ranks is None else self.ranks.most_summed // self.n_embd

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        return self.bent(self.output(hidden))

    def forward(self, batch: Batch, taps: Sequence[int] = ()) -> Out:
        if self.lead is not None:
            return self.lead.forward(self.run, batch, taps)
        return self.run(batch, taps).whole()

    @torch.inference_mode()
    def states(self, batch: Batch) -> Tensor:
        """Hidden states [row, n_hidden] f32 of every row, as of an MTP block: for a drafter, which asks for few logits."""
        x, angles = self.ropes.embedded(self.embedding, batch.tokens, batch.positions)
        given = self._given(x, angles, batch)
        x = self.residual.begin(x)
        for block in self.blocks:
            x = block.run(x, given)
        return self.residual.state(x)

    def _given(self, x: Tensor, angles: tuple[Angles, ...], batch: Batch) -> Pass:
        """x: rows of the embedding."""
        rows, queries = self.tables.rows(batch.tokens), self.ropes.queries(batch.positions)
        inputs = None if self.inputs is None else self.inputs(batch.tokens, x)
        return Pass(angles, self.memory, batch, rows, queries, inputs, self.ringed(batch))

    def of_states(self, hidden: Tensor) -> Tensor:
        """Logits [row, n_vocab] of the result of `states`."""
        return self.head(self.residual.headed(hidden))

    @torch.inference_mode()
    def run(self, batch: Batch, taps: Sequence[int] = ()) -> Out:
        """A forward of this rank; `forward` has the others run theirs."""
        x, angles = self.ropes.embedded(self.embedding, batch.tokens, batch.positions)
        given = self._given(x, angles, batch)
        x = self.residual.begin(x)
        tapped: dict[int, Tensor] = {}
        for i, block in enumerate(self.blocks):
            x = block.run(x, given)
            if i in taps:
                tapped[i] = self.residual.tapped(x)
        hidden, wanted = self.residual.end(x, batch.out_rows)
        beside = tensors.side_by_side([tapped[i] for i in taps]) if taps else None
        return out_of(self.output, wanted, hidden, beside, self.bent)
