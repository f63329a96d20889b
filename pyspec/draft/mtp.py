"""MTP drafter (qwen35, qwen35moe, nemotron_h_moe; deepseek4 by `mtp_streams`): the model's own next-token block, chained to any depth (`chain.py`).

The block pairs a token with the target's final-norm hidden state of the position before it; chaining feeds its own post-norm output.
It stands in the target's file behind the trunk, or in a file of its own.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from pyspec.config import EngineSettings
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.draft import mtp_streams
from pyspec.draft.chain import Chain, ChainedBlock, graph_bytes, most_waiting
from pyspec.draft.drafter import OWN_HEAD, DraftOptions, DraftPlan, Needs, TargetFile, own_memory
from pyspec.errors import PairError
from pyspec.gguf import GGUFFile
from pyspec.models.decoder import Block, DecoderConfig, block_tensors
from pyspec.models.deepseek4_config import Deepseek4Config
from pyspec.models.layers import Rope
from pyspec.models.target import ModelConfig, Out, Target
from pyspec.models.wants import Want, check_tensors
from pyspec.models.weights import Embedding, Matrix, Weights
from pyspec.slots.batch import Batch
from pyspec.slots.memory import KV, Memory
from pyspec.slots.parts import LayerParts, Paged
from pyspec.slots.table import SlotTable

N_DRAFT = 3  # tokens a round, unless a number is asked for


@runtime_checkable
class DecoderParts(Protocol):
    """What an MTP block shares of its target, whose layers it is made like."""

    config: DecoderConfig
    rope: Rope
    embedding: Embedding
    norm: Tensor

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [row, n_embd] to logits [row, n_vocab]."""
        ...


def recognises(file: GGUFFile) -> bool:
    """True if the file carries the block itself; the metadata key alone proves nothing."""
    return any(name.endswith(".nextn.eh_proj.weight") for name in file.tensors)


def plan(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    is_own_file = file is not None
    file, c = target.file if file is None else file, target.config
    if not recognises(file):
        raise PairError("no MTP block in the file: it has no nextn.eh_proj tensor")
    check_pair(file, c)
    layers: tuple[LayerParts, ...]
    if isinstance(c, Deepseek4Config):
        check_tensors(file, mtp_streams.tensors(c, file, is_own_file=is_own_file))
        layers, shared = mtp_streams.layers(c), mtp_streams.shared(file, target.file)
    else:
        assert isinstance(c, DecoderConfig)
        check_tensors(file, mtp_tensors(c, file))
        layers, shared = (*[{}] * c.n_layer, {KV: Paged(c.attention.n_kv_head, c.attention.head_dim)}), ()
    n_draft, n_waiting = settings.n_draft_max or N_DRAFT, most_waiting(settings.np)
    return DraftPlan(
        kind="mtp",
        needs=Needs(n_draft, overhang=n_draft + 1, chained=True, hidden=True),
        file=file,
        layers=layers,
        shared=shared,
        attention=(c.attention,),
        n_waiting=n_waiting,
        graph_bytes=graph_bytes(settings.np, max(n_draft + 1, n_waiting), c, settings.draft_p_min),
        no_copy=OWN_HEAD if f"blk.{c.n_layer}.nextn.shared_head_head.weight" in file.tensors else "",
    )


def check_pair(file: GGUFFile, c: ModelConfig) -> None:
    """Refuse a block of another model, with the numbers that differ."""
    a = file.architecture
    if a != c.arch:
        raise PairError(f"the MTP file is {a}, the target is {c.arch}")
    h = file.hparams
    n_layer, n_embd = h.integer("block_count") - h.integer("nextn_predict_layers", 0), h.integer("embedding_length")
    if n_layer != c.n_layer or n_embd != c.n_embd:
        raise PairError(
            f"the MTP block follows layer {n_layer} of width {n_embd}; "
            f"the target has {c.n_layer} layers of width {c.n_embd}"
        )


def mtp_tensors(c: DecoderConfig, file: GGUFFile) -> dict[str, Want]:
    """Wanted tensors of the MTP block, which stands after the trunk."""
    p, n = f"blk.{c.n_layer}", c.n_embd
    return {
        **block_tensors(c, file, p, c.mtp_layer),
        f"{p}.nextn.eh_proj.weight": Want((n, 2 * n)),
        f"{p}.nextn.enorm.weight": Want((n,)),
        f"{p}.nextn.hnorm.weight": Want((n,)),
        f"{p}.nextn.shared_head_norm.weight": Want((n,), optional=True),
        f"{p}.nextn.embed_tokens.weight": Want((c.n_vocab, n), optional=True),
        f"{p}.nextn.shared_head_head.weight": Want((c.n_vocab, n), optional=True),
    }


class MtpBlock:
    """One MTP block over the target's embedding and head; `head` stands for the target's if it is given.

    Its last norm is RMSNorm for every architecture. llama.cpp has LayerNorm there for nemotron_h_moe; other runtimes do not.
    """

    def __init__(self, weights: Weights, memory: Memory, target: DecoderParts, head: Matrix | None) -> None:
        config = target.config
        p = f"blk.{config.n_layer}"
        self.memory, self.layer, self.n_hidden = memory, config.n_layer, config.n_embd
        self.rope: Rope = target.rope
        self.block = Block(config, weights, p, self.rope, config.mtp_layer, memory.kv_dtype)
        self.eh: Matrix = weights.matrix(f"{p}.nextn.eh_proj.weight")
        self.enorm, self.hnorm = weights.vector(f"{p}.nextn.enorm.weight"), weights.vector(f"{p}.nextn.hnorm.weight")
        norm = weights.optional(f"{p}.nextn.shared_head_norm.weight")
        self.norm = target.norm if norm is None else norm
        self.norms = self.last_norm = norms.bind(NormsSpec(weights.device, config.n_embd, config.eps))
        own = f"{p}.nextn.embed_tokens.weight"
        self.embedding: Embedding = weights.embedding(own) if weights.has(own) else target.embedding
        own = f"{p}.nextn.shared_head_head.weight"
        self.head = weights.matrix(own) if weights.has(own) else head or target.head

    def forward(self, batch: Batch, hidden: Tensor) -> Tensor:
        """hidden [row, n_embd] f32: h_{p-1} of each row. Returns the post-norm output [row, n_embd]."""
        e, angles = self.rope.embedded(self.embedding, batch.tokens, batch.positions)
        x = self.eh(self.norms.paired(e, self.enorm, hidden, self.hnorm))
        x = self.block(x, angles, self.memory, self.layer, batch)
        return self.last_norm(x, self.norm)

    def states_of(self, out: Out) -> Tensor:
        """The block reads the target's hidden states as they are."""
        return out.hidden


def load(plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> Chain:
    assert plan.file is not None
    weights = Weights(plan.file, target.device, options.dense, wide=options.wide)
    memory = own_memory(plan, table, options, target.device)
    block: ChainedBlock
    if isinstance(getattr(target, "config", None), Deepseek4Config):
        assert isinstance(target, mtp_streams.StreamsParts)
        block = mtp_streams.StreamsMtpBlock(weights, memory, target, options.head, plan.shared)
    elif isinstance(target, DecoderParts):
        block = MtpBlock(weights, memory, target, options.head)
    else:
        raise PairError("this architecture has no MTP block that pyspec can run")
    return Chain(block, plan, table, target.device, options.settings.draft_p_min)
