"""A model as data: embedding, blocks, head, and the numbers of its file, over which plans are folds; and the same bound to its memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyspec.cpu import tensors
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec
from pyspec.models.bound import Block, link_reads, link_sums
from pyspec.models.cuts import Cut, Units
from pyspec.models.kernels import Programs, kernels, program_of, scratch_bytes
from pyspec.models.mtp_block import MtpOfBlock
from pyspec.models.part import AttentionShape, Binding, ForwardSize, LoadTypes, Pass, Place, Request
from pyspec.models.per_layer import PerLayer
from pyspec.models.residual import Residual
from pyspec.models.ringed import Ringed
from pyspec.models.rope import Angles, Ropes
from pyspec.models.tables import Tables
from pyspec.models.target import Bend, Lead, MtpSpec, Out, Target, out_of
from pyspec.models.wants import Want
from pyspec.models.weights import EMBEDDING, HEAD, Weights
from pyspec.slots.arena import PROMPTS
from pyspec.slots.batch import Batch
from pyspec.slots.memory import Memory
from pyspec.slots.parts import LayerParts


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder read from a file and checked. Implements `ModelConfig`.

    n_nextn      MTP blocks that the metadata announces
    n_ff         inner values of a row; with experts, those of all that it uses
    blocks       of the trunk
    mtp_block    the block behind the trunk, where the architecture has one
    residual     one stream or several
    per_layer    inputs of each block besides the stream
    last_norm    the name of the norm before the head
    ties_head    a file without a head has the embedding for it
    embed_factor  the embedding's rows are multiplied with it
    logit_factor  logits are multiplied with it
    final_cap    c: logits are c tanh(logits / c); 0: as they are
    """

    arch: str
    n_vocab: int
    n_embd: int
    n_nextn: int = 0
    n_ff: int
    n_ctx_train: int
    eps: float
    blocks: tuple[BlockSpec, ...]
    mtp_block: BlockSpec | None = None
    residual: Residual = Residual()  # noqa: RUF009 - frozen
    per_layer: PerLayer | None = None
    last_norm: str = "output_norm.weight"
    ties_head: bool = True
    embed_factor: float = 1.0
    logit_factor: float = 1.0
    final_cap: float = 0.0

    @property
    def n_layer(self) -> int:
        """Blocks of the trunk."""
        return len(self.blocks)

    @property
    def n_hidden(self) -> int:
        """Width of the hidden states that an MTP block reads."""
        return self.residual.n * self.n_embd

    @property
    def attention(self) -> tuple[AttentionShape, ...]:
        """The distinct shapes of attention."""
        return tuple(dict.fromkeys(shape for block in self.blocks for shape in block.attention))

    @property
    def captures_prompts(self) -> bool:
        """Whether a CUDA graph may hold the forward of a prompt that stands alone, kernels permitting."""
        return all(block.captures_prompts for block in self.blocks)

    @property
    def mtp(self) -> MtpSpec | None:
        """The MTP block with its projections and norms; None: the architecture has none."""
        if self.mtp_block is None:
            return None
        return MtpOfBlock(
            self.mtp_block, self.residual, self.n_layer, self.n_vocab, self.n_embd, self.eps
        )

    def place(self, file: GGUFFile, i: int) -> Place:
        """Of block `i`."""
        return Place(file, f"blk.{i}", self.n_embd, self.eps)

    def tensors(self, file: GGUFFile) -> dict[str, Want]:
        """The tensors that the trunk needs."""
        wants = {
            EMBEDDING: Want((self.n_vocab, self.n_embd)),
            self.last_norm: Want((self.n_embd,)),
            HEAD: Want(
                (self.n_vocab, self.n_embd),
                self.ties_head,
                cut=Cut(0, (Units(self.n_vocab, "tokens", uneven=True),)),
            ),
            **self.residual.tensors(self.n_embd),
            **({} if self.per_layer is None else self.per_layer.tensors()),
        }
        for i, block in enumerate(self.blocks):
            wants |= block.tensors(self.place(file, i))
        return wants

    def parts(self) -> list[LayerParts]:
        """Memory of each trunk layer for its slots."""
        return [block.memory() for block in self.blocks]

    def share(self, n: int) -> ModelSpec:
        """The model of each of `n` ranks: a share of the heads, states and inner widths of every block. The stream keeps its width."""
        if n == 1:
            return self
        blocks = tuple(block.share(n) for block in self.blocks)
        return replace(self, n_ff=-(-self.n_ff // n), blocks=blocks)

    def of_file(self, file: GGUFFile) -> ModelSpec:
        """The model with the sizes of blocks of this file's types, where shares of its parts depend on them."""
        blocks = tuple(block.of_file(self.place(file, i)) for i, block in enumerate(self.blocks))
        return replace(self, blocks=blocks)

    def programs(self, file: GGUFFile, on: LoadTypes, blocks: Iterable[int]) -> Programs:
        """The forwards of some of its blocks."""
        return [program_of(self.blocks[i].forward, self.place(file, i), on) for i in blocks]

    def requests(self, file: GGUFFile, on: LoadTypes) -> Iterator[Request]:
        """The ops that a load asks for, products and the embedding apart."""
        yield from kernels(self.programs(file, on, range(self.n_layer)))
        if self.per_layer is not None:
            yield from self.per_layer.requests(file, on)
        yield norms, NormsSpec(on.device, self.n_embd, self.eps)

    def scratch_bytes(self, file: GGUFFile, on: LoadTypes, n_row: int, n_token: int) -> int:
        """Bytes that a forward of `n_row` rows takes while it runs, beyond those that every model takes: those of the largest block and of
        the streams. Contexts have up to `n_token` tokens."""
        size = ForwardSize(on.device, on.kv.k.dtype, n_row, n_token, self.n_embd, self.eps)
        of_inputs = 0 if self.per_layer is None else self.per_layer.row_bytes
        rows = n_row * (self.residual.row_bytes(self.n_embd) + of_inputs)
        distinct = {block: i for i, block in enumerate(self.blocks)}
        return scratch_bytes(self.programs(file, on, distinct.values()), size) + rows

    def build(self, weights: Weights, memory: Memory) -> Target:
        """The model, bound to its memory."""
        return Decoder(self, weights, memory)


class Decoder:
    """Implements `Target`. Tensors are bound in the order of the file."""

    def __init__(self, config: ModelSpec, weights: Weights, memory: Memory) -> None:
        own, kv = config.share(weights.n_rank), memory.kv_format
        self.config, self.memory, self.device, self.ranks = config, memory, weights.device, weights.ranks
        self.n_vocab, self.n_embd, self.n_layer = config.n_vocab, config.n_embd, config.n_layer
        self.lead: Lead | None = None
        self.embedding = weights.embedding(EMBEDDING, config.embed_factor)
        self.inputs = None if config.per_layer is None else config.per_layer.bind(weights)
        self.ropes, self.tables = Ropes(weights), Tables()
        self.ringed = Ringed(memory, weights.device)
        self.blocks = [
            config.residual.bind_block(
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
        self.residual = config.residual.bind(weights, config.n_embd, config.eps, self.norm)
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
        behind = self.residual.through(self.residual.begin(x), self.blocks, given)
        return self.residual.state(deque(behind, maxlen=1).pop())

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
        for i, x in enumerate(self.residual.through(x, self.blocks, given)):  # noqa: B020 - one name: old rows go
            if i in taps:
                tapped[i] = self.residual.tapped(x)
        hidden, wanted = self.residual.end(x, batch.out_rows)
        beside = tensors.side_by_side([tapped[i] for i in taps]) if taps else None
        return out_of(self.output, wanted, hidden, beside, self.bent)
