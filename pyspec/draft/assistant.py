"""gemma4-assistant: a small stack of layers without keys, which read those of the target; chained (`chain.py`).

A row pairs the target's embedding of a token with a hidden state, the target's or the drafter's own. All tokens of a draft have the
position of the first one, and see the keys before it: the drafter writes none, so nothing comes between. It keeps one hidden state a
slot, and never has to catch up. Source: llama.cpp `gemma4-assistant`; which of the target's layers are read is its rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pyspec.config import EngineSettings
from pyspec.cpu.tensors import side_by_side
from pyspec.cuda.graph import copied
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.draft.chain import Chain, graph_bytes
from pyspec.draft.drafter import OWN_HEAD, DraftOptions, DraftPlan, TargetFile
from pyspec.errors import ConfigError, PairError
from pyspec.gguf import GGUFFile
from pyspec.gguf.fields import SIZE
from pyspec.models.arch.gemma4 import SCALE, read_kind
from pyspec.models.binding import Pass, bound_at
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.bound import Block
from pyspec.models.checks import check_read, check_tensors
from pyspec.models.decoder import Decoder
from pyspec.models.kernels import kernels, program_of
from pyspec.models.model import ModelSpec
from pyspec.models.own_vocabulary import BestDrafts
from pyspec.models.part import LoadTypes, Place, Request
from pyspec.models.read import block_count, vocab_size
from pyspec.models.ropes import Ropes
from pyspec.models.target import MtpNet, Out, Target
from pyspec.models.wants import EMBEDDING, Want
from pyspec.models.weights import Weights
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch, Seq, lay_out
from pyspec.slots.memory import Memory
from pyspec.slots.ring_pool import RingPool
from pyspec.slots.table import SlotTable

ARCH = "gemma4-assistant"
TARGET = "gemma4"
N_DRAFT = 3  # tokens a round, unless a number is asked for
PRE, POST, NORM = "nextn.pre_projection.weight", "nextn.post_projection.weight", "output_norm.weight"
UNREAD = "masked_embd_"  # tensors of a choice among clusters of tokens, which is not made: all tokens are scored


@dataclass(frozen=True, kw_only=True)
class AssistantConfig:
    """n_target: width of the target's hidden states."""

    n_embd: int
    n_target: int
    n_vocab: int
    eps: float
    blocks: tuple[BlockSpec, ...]

    def place(self, file: GGUFFile, i: int) -> Place:
        """Of block `i`."""
        return Place(file, f"blk.{i}", self.n_embd, self.eps)

    def tensors(self, file: GGUFFile) -> dict[str, Want]:
        """The manifest."""
        wants = {
            EMBEDDING: Want((self.n_vocab, self.n_embd)),
            NORM: Want((self.n_embd,)),
            PRE: Want((self.n_embd, 2 * self.n_target)),
            POST: Want((self.n_target, self.n_embd)),
        }
        for i, block in enumerate(self.blocks):
            own = block.tensors(self.place(file, i)) | {f"blk.{i}.{SCALE}": Want((1,))}
            wants |= {name: replace(want, cut=None) for name, want in own.items()}
        return wants


def recognises(file: GGUFFile) -> bool:
    return file.architecture == ARCH


def read_assistant(file: GGUFFile, target: ModelSpec) -> AssistantConfig:
    """The drafter's configuration beside this target. PairError where a layer's heads do not fit the keys that it would read."""
    h, n_block = file.hparams, block_count(file)
    window = h.integer("attention.sliding_window")
    heads = h.each("attention.head_count", n_block)
    widths = h.each("feed_forward_length", n_block)
    blocks = []
    for i, near in enumerate(h.flags("attention.sliding_window_pattern", n_block, or_more=True)):
        reads, keys = _last(target, near)
        shape, rope = read_kind(file, heads[i], keys.shape.n_kv_head, near)
        if shape.head_dim != keys.shape.head_dim:
            raise PairError(
                f"layer {i} of the drafter has heads of {shape.head_dim} dimensions; "
                f"the keys of the target's layer {reads}, which it would read, have {keys.shape.head_dim}"
            )
        mixer = Attention(shape, rope, window if near else 0, qk_norm=True, reads=reads)
        feed = Part("ffn_norm", Mlp(widths[i], "gelu"), post="post_ffw_norm")
        blocks.append(BlockSpec((Part("attn_norm", mixer, post="post_attention_norm"), feed), SCALE))
    return AssistantConfig(
        n_embd=h.integer("embedding_length"),
        n_target=h.integer("embedding_length_out", legal=SIZE),
        n_vocab=vocab_size(file),
        eps=h.number("attention.layer_norm_rms_epsilon"),
        blocks=tuple(blocks),
    )


def _last(target: ModelSpec, near: bool) -> tuple[int, Attention]:
    """The layer whose keys the target's last one with a window, or without, has; and its attention."""
    for i, block in reversed([*enumerate(target.blocks)]):
        found = next(part for part in block.specs if isinstance(part, Attention))
        if bool(found.window) == near:
            return (i, found) if found.reads is None else (found.reads, found)
    raise PairError(f"the target has no layer {'with' if near else 'without'} a window to read")


def plan(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    if file is None:
        raise ConfigError("--spec-type assistant needs a draft file (-md)")
    if not recognises(file):
        raise PairError(f"an assistant is of architecture {ARCH}; this file is {file.architecture}")
    t = target.config
    if t.arch != TARGET:
        raise PairError(f"an assistant drafts for {TARGET}; the target is {t.arch}")
    if settings.tp > 1:
        raise PairError(
            f"an assistant reads keys of all heads, and each of --tp {settings.tp} ranks has some of them only"
        )
    c = read_assistant(file, t)
    if c.n_target != t.n_embd:
        raise PairError(
            f"the assistant was made for a width of {c.n_target}; the target's is {t.n_embd}"
        )
    if c.n_vocab != t.n_vocab:
        raise PairError(f"the assistant has {c.n_vocab} tokens, the target {t.n_vocab}")
    wants = c.tensors(file)
    check_tensors(file, wants)
    unread = [name for name in file.tensors if name.startswith(UNREAD)]
    check_read(file, (*wants, *unread), len(c.blocks))
    n_draft = settings.n_draft_max or N_DRAFT
    return DraftPlan(
        kind="assistant",
        n_draft=n_draft,
        observes="hidden",
        file=file,
        attention=tuple(dict.fromkeys(shape for block in c.blocks for shape in block.attention)),
        wants=wants,
        requests=partial(_requests, c, file),
        n_waiting=1,
        graph_bytes=graph_bytes(settings.np, n_draft + 1, t, settings.draft_p_min),
        no_copy=OWN_HEAD,
    )


def _requests(c: AssistantConfig, file: GGUFFile, on: LoadTypes) -> Iterator[Request]:
    """The ops that its layers ask for."""
    for i, block in enumerate(c.blocks):
        yield from kernels([program_of(block.forward, c.place(file, i), on)])
    yield norms, NormsSpec(on.device, c.n_embd, c.eps)


class AssistantBlock:
    """The layers, bound to the target's memory. Implements `MtpNet`; `next_of` gives the hidden states of the next pass."""

    first_key = 0

    def __init__(self, c: AssistantConfig, w: Weights, target: Decoder) -> None:
        self.target, self.n_hidden, self.memory = target, c.n_target, Memory([], 1)
        self.ropes, kv = Ropes(w), target.memory.kv_format
        self.blocks = [
            Block(block, bound_at(w, f"blk.{i}", i, c.n_embd, c.eps, kv, self.ropes))
            for i, block in enumerate(c.blocks)
        ]
        self.pre, self.post, self.norm = w.matrix(PRE), w.matrix(POST), w.vector(NORM)
        self.norms, self.output = norms.bind(NormsSpec(w.device, c.n_embd, c.eps)), w.matrix(EMBEDDING)
        self.best = BestDrafts(w.device)

    def forward(self, batch: Batch, hidden: Tensor) -> Tensor:
        """hidden [row, n_hidden] f32. Returns the normed rows [row, n_embd] f32 that `propose` and `next_of` read."""
        x = self.pre(side_by_side([self.target.embed(batch.tokens), hidden]))
        rings = self.target.ringed(batch)
        run = Pass(self.ropes.angles(batch.positions), self.target.memory, batch, rings=rings)
        for block in self.blocks:
            x = block.run(x, run)
        return self.norms(x, self.norm)

    def propose(self, hidden: Tensor, out: Tensor) -> Tensor:
        """The tokens of the best logits, and these."""
        logits = self.output(hidden)
        self.best(logits, out)
        return logits

    def next_of(self, hidden: Tensor) -> Tensor:
        """[row, n_hidden] f32: in place of the target's hidden states in the next pass."""
        return self.post(hidden)

    def states_of(self, out: Out) -> Tensor:
        """The target's hidden states."""
        return out.hidden


class Assistant(Chain):
    """A chain whose passes all have the position of the first one, and whose rows see the keys before it."""

    def __init__(
        self,
        block: AssistantBlock,
        plan: DraftPlan,
        table: SlotTable,
        device: torch.device,
        p_min: float,
    ) -> None:
        self.own = block
        super().__init__(block, plan, table, device, p_min)

    @torch.inference_mode()
    def observe(self, batch: Batch, kept: Sequence[int], out: Out) -> None:
        """Keeps the last hidden state of each slot."""
        hidden = self.block.states_of(out)
        for s, seq in enumerate(batch.seqs):
            if kept[s]:
                state, last = self._state(self.table.slots[seq.slot]), batch.starts[s] + kept[s]
                state.n_row = seq.n_past + kept[s]
                state.add(hidden, last - 1, last, after=False)

    def _lay_out(self, seqs: Sequence[Seq], arena: Arena | None) -> Batch:
        return lay_out(self.table, seqs, self.device, arena=arena, sees_own=False)

    def _step(self, batch: Batch, net: MtpNet | None = None) -> None:
        n = batch.tokens.shape[0]
        self._pick(self.block.forward(replace(batch, tokens=self.tokens[:n]), self.hidden[:n]))

    def _pick(self, hidden: Tensor, net: MtpNet | None = None) -> None:
        n = hidden.shape[0]
        logits = self.block.propose(hidden, self.tokens[:n])
        copied(self.own.next_of(hidden), self.hidden[:n])
        if self.p_min > 0:
            self.probs[:n] = logits.softmax(-1).amax(-1)


def _check_rings(c: AssistantConfig, memory: Memory) -> None:
    """PairError where the target keeps fewer keys of a layer than the drafter would read."""
    for part in (part for block in c.blocks for part in block.specs if isinstance(part, Attention)):
        pool = memory.kv[part.reads or 0]
        if isinstance(pool, RingPool) and not 0 < part.window <= pool.window:
            raise PairError(
                f"the drafter's window has {part.window} tokens, and the target keeps those of {pool.window}: "
                "add --swa-full"
            )


def load(plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> Chain:
    assert plan.file is not None
    if not isinstance(target, Decoder):
        raise PairError("this target does not give the keys that its assistant reads")
    c = read_assistant(plan.file, target.config)
    _check_rings(c, target.memory)
    flags = target.ropes.flags  # its queries meet keys that these have turned
    weights = Weights(plan.file, target.device, rope=flags, **options.of_weights)
    block = AssistantBlock(c, weights, target)
    return Assistant(block, plan, table, target.device, options.settings.draft_p_min)
