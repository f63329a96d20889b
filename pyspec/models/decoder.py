"""A model bound to its memory: one decoder runs every model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pyspec.cpu import tensors
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.ring_places.op import ring_places
from pyspec.cuda.ops.ring_places.ref import RingPlacesSpec
from pyspec.errors import EngineBug, OutOfBounds
from pyspec.models.binding import Pass, Tables, bound_at
from pyspec.models.blocks.layer_input import layer_inputs
from pyspec.models.bound import Block, BoundForward, link_reads, link_sums
from pyspec.models.gathered import Bend, out_of
from pyspec.models.model import ModelSpec
from pyspec.models.ropes import Angles, Ropes
from pyspec.models.streams import bound_block, bound_residual
from pyspec.models.target import Lead, Out
from pyspec.models.wants import EMBEDDING
from pyspec.models.weights import Weights
from pyspec.slots.arena import PROMPTS
from pyspec.slots.batch import Batch, PictureRows
from pyspec.slots.memory import Memory


class Ringed:
    """The places of a batch in rings of pages: made once a forward for all layers with windows, as angles are. A model may have none."""

    def __init__(self, memory: Memory, device: torch.device) -> None:
        self.sizes, self.n_chunk = memory.rings, memory.n_chunk
        self.capturable = True
        if self.sizes:
            spec = RingPlacesSpec(device)
            self.run = ring_places.bind(spec)
            self.capturable = ring_places.chosen(spec).capturable

    def __call__(self, batch: Batch) -> Mapping[int, Batch]:
        """The batch for each size of rings, by pages of a ring.

        Raises OutOfBounds where a sequence has more rows than rings have room for beside the window.
        """
        if not self.sizes:
            return {}
        for seq in batch.seqs:
            if seq.width > self.n_chunk:
                raise OutOfBounds(
                    f"slot {seq.slot} rows of a forward", seq.width, self.n_chunk + 1, seq.slot
                )
        found = {}
        for n, null_row in self.sizes.items():
            rows, pages = self.run(batch, n, null_row)
            found[n] = replace(batch, kv_rows=rows, page_table=pages, pages=())
        return found


class Decoder:
    """Implements `Target`. Tensors are bound in the order of the file."""

    def __init__(self, config: ModelSpec, weights: Weights, memory: Memory) -> None:
        own, kv = config.share(weights.n_rank), memory.kv_format
        self.config, self.memory, self.device, self.ranks = config, memory, weights.device, weights.ranks
        self.n_vocab, self.n_embd, self.n_layer = config.n_vocab, config.n_embd, config.n_layer
        self.lead: Lead | None = None
        self.embedding = weights.embedding(EMBEDDING, config.embed_factor)
        self.ropes, self.tables = Ropes(weights), Tables()
        of_model = bound_at(weights, "", 0, own.n_embd, own.eps, kv, self.ropes, self.tables)
        self.inputs = None
        if (inputs := config.per_layer) is not None:
            self.inputs = BoundForward(partial(layer_inputs, inputs), of_model, own.n_embd)
        self.ringed = Ringed(memory, weights.device)
        self.blocks = [
            bound_block(config.residual, block, replace(of_model, prefix=f"blk.{i}", layer=i))
            for i, block in enumerate(own.blocks)
        ]
        self.tables.close()
        plain = [block for block in self.blocks if isinstance(block, Block)]
        link_reads(plain)
        if self.ranks is not None:
            link_sums(self.ranks, plain)
        for i, state in memory.states.items():
            state.fold = self.blocks[i].fold
        self.norm = weights.vector(config.last_norm) if config.last_norm else None
        self.residual = bound_residual(
            config.residual, weights, config.n_embd, config.eps, self.norm, self.blocks, of_model
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
            return self.lead(self.run, batch, taps)
        return self.run(batch, taps).whole()

    @torch.inference_mode()
    def states(self, batch: Batch) -> Tensor:
        """Hidden states [row, n_hidden] f32 of every row, as of an MTP block: for a drafter, which asks for few logits."""
        x, angles = self.ropes.embedded(self.embedding, batch)
        given = self._given(x, angles, batch)
        x = self.residual.begin(x)
        for block in self.blocks:
            x = block.run(x, given)
        return self.residual.state(x)

    def _given(self, x: Tensor, angles: tuple[Angles, ...], batch: Batch) -> Pass:
        """x: rows of the embedding."""
        rows, queries = self.tables.rows(batch.tokens), self.ropes.queries(batch.positions)
        near = batch.seeing_pictures() if self.config.sees_pictures else batch
        rings, whole = self.ringed(near), near if self.config.sees_pictures == "all" else batch
        given = Pass(angles, self.memory, whole, rows, queries, rings=rings, near=near)
        return given if self.inputs is None else replace(given, inputs=self.inputs.run(x, given))

    def _deepened(self, x: Tensor, i: int, pictures: PictureRows) -> Tensor:
        """The stream x behind block `i`, with the part that pictures' rows have for it."""
        assert pictures.rows is not None, "the embedding has read them"
        if pictures.rows.shape[1] < self.config.picture_width:
            raise EngineBug(
                f"rows of pictures have {pictures.rows.shape[1]} numbers, {self.config.picture_width} are needed"
            )
        part = pictures.rows[:, (i + 1) * self.n_embd : (i + 2) * self.n_embd]
        return torch.where(pictures.is_row, x + part, x)

    def of_states(self, hidden: Tensor) -> Tensor:
        """Logits [row, n_vocab] of the result of `states`."""
        return self.head(self.residual.headed(hidden))

    @torch.inference_mode()
    def run(self, batch: Batch, taps: Sequence[int] = ()) -> Out:
        """A forward of this rank; `forward` has the others run theirs."""
        x, angles = self.ropes.embedded(self.embedding, batch)
        given = self._given(x, angles, batch)
        x = self.residual.begin(x)
        tapped: dict[int, Tensor] = {}
        for i, block in enumerate(self.blocks):
            x = block.run(x, given)
            if i < self.config.n_deep and batch.pictures is not None:
                x = self._deepened(x, i, batch.pictures)
            if i in taps:
                tapped[i] = self.residual.tapped(x)
        hidden, wanted = self.residual.end(x, batch.out_rows)
        beside = tensors.side_by_side([tapped[i] for i in taps]) if taps else None
        return out_of(self.output, wanted, hidden, beside, self.bent)
