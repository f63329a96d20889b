"""A decoder of one residual stream, whose blocks are a mixer (attention, a recurrence), a feed-forward, or both.

Architectures are declarations of this: a DecoderConfig read from the file and the tensors it implies. To add
a kind of mixer or feed-forward: a line in MIXERS or FEEDS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.exact import EXACT
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.errors import BadTensors, ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.cuts import Cut, Units
from pyspec.models.layers import SINKS, Attention, AttentionShape, FeedForward, GatedDeltaNet, Relu2, Rope
from pyspec.models.mamba import Mamba, mamba_tensors
from pyspec.models.moe import MoeFeed, MoeShape, moe_tensors
from pyspec.models.rope_scaling import NOT_STRETCHED, RopeScaling
from pyspec.models.target import Lead, Out, out_of
from pyspec.models.wants import Want
from pyspec.models.weights import HEAD, Weights
from pyspec.slots.batch import Batch
from pyspec.slots.memory import KV, STATE, Memory
from pyspec.slots.parts import LayerParts, Paged, Recurrent
from pyspec.slots.recurrent import RecurrentShape


@dataclass(frozen=True, slots=True)
class Layer:
    """What one block is made of: keys of MIXERS and FEEDS, "" for none; the GGUF name of the norm before the feed-forward;
    its experts."""

    mixer: str = "attention"
    feed: str = "swiglu"
    feed_norm: str = "ffn_norm"
    moe: MoeShape | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything the forward needs to know, read from metadata and checked."""

    arch: str
    n_vocab: int
    n_embd: int
    n_layer: int  # trunk layers, without MTP blocks
    n_nextn: int = 0  # MTP blocks the metadata announces
    n_ff: int  # inner values of a row; with experts, those of all it uses
    n_ctx_train: int
    eps: float
    attention: AttentionShape
    n_rot: int
    rope_base: float
    rope_scaling: RopeScaling = NOT_STRETCHED
    rope_neox: bool
    qk_norm: bool = False
    layers: tuple[Layer, ...]  # of the trunk
    mtp_layer: Layer = Layer()
    state: RecurrentShape | None = None  # of the recurrent mixers

    def __post_init__(self) -> None:
        check_rope(self.n_rot, self.attention.head_dim)

    @property
    def n_hidden(self) -> int:
        """Width of what an MTP block reads of a row."""
        return self.n_embd

    def tensors(self, file: GGUFFile) -> dict[str, Want]:
        """The whole manifest of the trunk."""
        return decoder_tensors(self, file)

    def build(self, weights: Weights, memory: Memory) -> Decoder:
        """The model, bound to its memory."""
        return Decoder(self, weights, memory)

    def share(self, n: int) -> DecoderConfig:
        """What each of `n` ranks runs: its heads, states and inner widths of every layer. The stream stays as wide as it is."""
        if n == 1:
            return self
        layers = tuple(replace(x, moe=None if x.moe is None else x.moe.share(n)) for x in self.layers)
        state = None if self.state is None else self.state.share(n)
        return replace(self, attention=self.attention.share(n), n_ff=self.n_ff // n, layers=layers, state=state)

    def scratch_bytes(self, n_row: int, n_token: int, kv: torch.dtype, device: torch.device) -> int:
        """Nothing that is not counted for every model."""
        return 0

    def parts(self) -> list[LayerParts]:
        """What each trunk layer keeps for its slots."""
        return [{} if not layer.mixer else MIXERS[layer.mixer].parts(self) for layer in self.layers]


def read_attention(file: GGUFFile, *, gated: bool = False) -> AttentionShape:
    """Head counts and dimensions, with the rules of llama.cpp for absent keys."""
    h = file.hparams
    n_head = h.integer("attention.head_count")
    return attention_shape(file, n_head, h.integer("attention.head_count_kv", n_head), gated=gated)


def attention_shape(file: GGUFFile, n_head: int, n_kv: int, *, gated: bool = False) -> AttentionShape:
    """The shape of attention of so many heads and key heads."""
    h = file.hparams
    if n_head < 1 or n_kv < 1 or n_head % n_kv:
        raise ModelError(
            f"{n_head} heads do not divide into {n_kv} key heads ({h.prefix}attention.head_count, head_count_kv)"
        )
    dim = h.integer("attention.key_length", h.integer("embedding_length") // n_head)
    if dim < 1:
        raise ModelError(f"{n_head} heads do not fit a width of {h.integer('embedding_length')}")
    if (v := h.integer("attention.value_length", dim)) != dim:
        raise ModelError(f"keys of {dim} and values of {v} dimensions are not supported together")
    return AttentionShape(n_head, n_kv, dim, gated, h.number("attention.scale", 0.0) or None)


def block_count(file: GGUFFile) -> int:
    """Blocks by the metadata, MTP blocks included. Each has a tensor at least: a count that lies is found before any list is made."""
    n, n_tensor = file.hparams.integer("block_count"), len(file.tensors)
    if n > n_tensor:
        raise ModelError(f"{file.hparams.key('block_count')} is {n}, and the file has {n_tensor} tensors")
    return n


def trunk_layers(file: GGUFFile) -> tuple[int, int]:
    """(layers of the trunk, MTP blocks behind them). Where MTP was left out its block may be counted or not: the tensors tell."""
    n_block, n_nextn = block_count(file), file.hparams.integer("nextn_predict_layers", 0)
    if n_nextn >= n_block:
        a = file.hparams.prefix
        raise ModelError(f"{n_nextn} MTP blocks among {n_block} blocks ({a}nextn_predict_layers, block_count)")
    has_mtp = any(name.endswith(".nextn.eh_proj.weight") for name in file.tensors)
    if n_nextn and not has_mtp and f"blk.{n_block - 1}.attn_norm.weight" in file.tensors:
        return n_block, 0
    return n_block - n_nextn, n_nextn


def check_rope(n_rot: int, head_dim: int) -> None:
    """Rope turns pairs of a head's dimensions."""
    if n_rot % 2 or n_rot > head_dim:
        raise ModelError(f"rope can not turn {n_rot} dimensions of heads of {head_dim}: want an even number of them")


def vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding: the number of logits. They may be more than tokens, never fewer."""
    if "token_embd.weight" not in file.tensors:
        raise BadTensors("token_embd.weight: missing (is this a vocabulary-only or a sidecar file?)")
    n = file.tensors["token_embd.weight"].shape[0]
    if "tokenizer.ggml.tokens" in file.fields and len(tokens := file.fields.strings("tokenizer.ggml.tokens")) > n:
        raise BadTensors(f"token_embd.weight has {n} rows for {len(tokens)} tokens")
    return n


def attention_tensors(c: DecoderConfig, file: GGUFFile, p: str) -> dict[str, Want]:
    """Wanted tensors of an attention layer with prefix `p` (blk.N)."""
    s, n, fused = c.attention, c.n_embd, f"{p}.attn_qkv.weight" in file.tensors
    q, kv = s.n_head * s.head_dim * (2 if s.gated else 1), s.n_kv_head * s.head_dim
    of_q, of_kv = head_units(s)
    heads = Units(s.n_head, "heads")
    wants = {f"{p}.attn_output.weight": Want((n, s.n_head * s.head_dim), cut=Cut(1, (heads,)))}
    if fused:
        wants[f"{p}.attn_qkv.weight"] = Want((q + 2 * kv, n), cut=Cut(0, (of_q, of_kv, of_kv)))
    else:
        parts = (("q", q, of_q), ("k", kv, of_kv), ("v", kv, of_kv))
        wants |= {f"{p}.attn_{x}.weight": Want((rows, n), cut=Cut(0, (units,))) for x, rows, units in parts}
    return wants | attention_extras(s, n, p, file, qk_norm=c.qk_norm)


def head_units(s: AttentionShape) -> tuple[Units, Units]:
    """Rows of queries and of keys (or values) by head. Ranks that share a key head have a copy each."""
    q = s.head_dim * (2 if s.gated else 1)
    return Units(s.n_head, "heads", size=q), Units(s.n_kv_head, "key heads", copied=True, size=s.head_dim)


def attention_extras(s: AttentionShape, n_embd: int, p: str, file: GGUFFile, *, qk_norm: bool) -> dict[str, Want]:
    """What attention may have besides its matrices: norms of heads and biases, of all that they go with or of none; sinks."""
    q, kv = s.n_head * s.head_dim * (2 if s.gated else 1), s.n_kv_head * s.head_dim
    norms = [f"{p}.attn_{x}_norm.weight" for x in "qk"]
    of_q, of_kv = head_units(s)
    biases = {f"{p}.attn_q.bias": (q, of_q), f"{p}.attn_k.bias": (kv, of_kv), f"{p}.attn_v.bias": (kv, of_kv)}
    has_norms, has_biases = (any(name in file.tensors for name in names) for names in (norms, biases))
    return {
        **{name: Want((s.head_dim,), optional=not (qk_norm or has_norms)) for name in norms},
        **{name: Want((n,), optional=not has_biases, cut=Cut(0, (of,))) for name, (n, of) in biases.items()},
        f"{p}.attn_qkv.bias": Want((q + 2 * kv,), optional=True, cut=Cut(0, (of_q, of_kv, of_kv))),
        f"{p}.attn_output.bias": Want((n_embd,), optional=True),
        f"{p}.{SINKS}": Want((s.n_head,), optional=True, cut=Cut(0, (Units(s.n_head, "heads"),))),
    }


def state_tensors(c: DecoderConfig, p: str) -> dict[str, Want]:
    """Wanted tensors of a Gated DeltaNet layer."""
    assert isinstance(c.state, GdnShape)
    s, n = c.state, c.n_embd
    inner, k = s.n_v_head * s.dim, Units(s.n_k_head, "key heads of Gated DeltaNet")
    v = (k,) * (s.n_v_head // s.n_k_head)  # value head h reads key head h % n_k_head
    by_head, by_channel = Cut(0, v), Cut(0, (k, k, *v))
    return {
        f"{p}.attn_qkv.weight": Want((s.n_channel, n), cut=by_channel),
        f"{p}.attn_gate.weight": Want((inner, n), cut=by_head),
        f"{p}.ssm_alpha.weight": Want((s.n_v_head, n), cut=by_head),
        f"{p}.ssm_beta.weight": Want((s.n_v_head, n), cut=by_head),
        f"{p}.ssm_conv1d.weight": Want((s.n_channel, s.n_conv), cut=by_channel),
        f"{p}.ssm_a": Want((s.n_v_head,), cut=by_head),
        f"{p}.ssm_dt.bias": Want((s.n_v_head,), cut=by_head),
        f"{p}.ssm_norm.weight": Want((s.dim,)),
        f"{p}.ssm_out.weight": Want((n, inner), cut=Cut(1, v)),
    }


def swiglu_tensors(c: DecoderConfig, p: str) -> dict[str, Want]:
    """Wanted tensors of a SwiGLU feed-forward."""
    n, f, inner = c.n_embd, c.n_ff, (Units(c.n_ff, "inner values"),)
    return {
        f"{p}.ffn_gate.weight": Want((f, n), cut=Cut(0, inner)),
        f"{p}.ffn_up.weight": Want((f, n), cut=Cut(0, inner)),
        f"{p}.ffn_down.weight": Want((n, f), cut=Cut(1, inner)),
    }


def relu2_tensors(c: DecoderConfig, p: str) -> dict[str, Want]:
    """Wanted tensors of a feed-forward of relu^2."""
    n, f, inner = c.n_embd, c.n_ff, (Units(c.n_ff, "inner values"),)
    return {
        f"{p}.ffn_up.weight": Want((f, n), cut=Cut(0, inner)),
        f"{p}.ffn_up.bias": Want((f,), optional=True, cut=Cut(0, inner)),
        f"{p}.ffn_down.weight": Want((n, f), cut=Cut(1, inner)),
        f"{p}.ffn_down.bias": Want((n,), optional=True),
    }


def block_tensors(c: DecoderConfig, file: GGUFFile, p: str, layer: Layer) -> dict[str, Want]:
    """Wanted tensors of one whole block."""
    wants: dict[str, Want] = {}
    if layer.mixer:
        wants |= {f"{p}.attn_norm.weight": Want((c.n_embd,)), **MIXERS[layer.mixer].tensors(c, file, p, layer)}
    if layer.feed:
        wants |= {f"{p}.{layer.feed_norm}.weight": Want((c.n_embd,)), **FEEDS[layer.feed].tensors(c, file, p, layer)}
    return wants


def head_tensor(n_vocab: int, n_embd: int, *, optional: bool = False) -> Want:
    """The wanted head; optional: a file without one ties it to the embedding."""
    return Want((n_vocab, n_embd), optional, cut=Cut(0, (Units(n_vocab, "tokens", uneven=True),)))


def decoder_tensors(c: DecoderConfig, file: GGUFFile) -> dict[str, Want]:
    """The whole manifest of the trunk."""
    wants = {
        "token_embd.weight": Want((c.n_vocab, c.n_embd)),
        "output_norm.weight": Want((c.n_embd,)),
        HEAD: head_tensor(c.n_vocab, c.n_embd, optional=True),
        "rope_freqs.weight": Want((c.n_rot // 2,), optional=True),
    }
    for i, layer in enumerate(c.layers):
        wants |= block_tensors(c, file, f"blk.{i}", layer)
    return wants


def recurrent_parts(c: DecoderConfig) -> LayerParts:
    """What a layer with a recurrence keeps."""
    assert c.state is not None
    return {STATE: Recurrent(c.state)}


Angles = tuple[Tensor, Tensor]


class Mixer(Protocol):
    """The residual stream x [row, n_embd] f32 -> x + mixer(norm(x)), reading and writing what the layer keeps per slot."""

    capturable: bool  # a CUDA graph may hold it: it looks at no list of the host
    captures_prompts: bool  # and one of a prompt that stands alone, too
    reads: fuse.FirstRead | None  # the product that reads the stream, and the norm before it, if that is how it begins
    gives: fuse.GivesSum | None  # what ends it with a sum of ranks, if that is how it ends

    def __call__(self, x: Tensor, angles: Angles, memory: Memory, layer: int, batch: Batch) -> Tensor: ...


class Feed(Protocol):
    """The residual stream x [row, n_embd] f32 -> x + feed(norm(x)), row by row."""

    capturable: bool
    captures_prompts: bool
    reads: fuse.FirstRead | None
    gives: fuse.GivesSum | None

    def __call__(self, x: Tensor) -> Tensor: ...


class LayerKind(NamedTuple):
    """A kind of mixer or feed-forward: the tensors it wants, how to build it from them, and what it keeps for the slots.

    Both are built from the config, the weights and a block's prefix; a mixer also from the rope and the type of keys and
    values, a feed-forward from its Layer.
    """

    tensors: Callable[[DecoderConfig, GGUFFile, str, Layer], dict[str, Want]]
    build: Callable[..., Any]
    parts: Callable[[DecoderConfig], LayerParts] = lambda c: {}


def _mamba_tensors(c: DecoderConfig, p: str) -> dict[str, Want]:
    assert isinstance(c.state, Mamba2Shape)
    return mamba_tensors(c.state, c.n_embd, p)


def _moe_tensors(c: DecoderConfig, file: GGUFFile, p: str, layer: Layer) -> dict[str, Want]:
    assert layer.moe is not None
    return moe_tensors(layer.moe, c.n_embd, file, p)


MIXERS = {
    "attention": LayerKind(
        lambda c, file, p, layer: attention_tensors(c, file, p),
        lambda c, w, p, rope, kv: Attention(w, p, c.attention, rope, c.eps, kv),
        lambda c: {KV: Paged(c.attention.n_kv_head, c.attention.head_dim)},
    ),
    "delta": LayerKind(
        lambda c, file, p, layer: state_tensors(c, p),
        lambda c, w, p, rope, kv: GatedDeltaNet(w, p, c.state, c.eps),
        recurrent_parts,
    ),
    "mamba": LayerKind(
        lambda c, file, p, layer: _mamba_tensors(c, p),
        lambda c, w, p, rope, kv: Mamba(w, p, c.state, c.eps),
        recurrent_parts,
    ),
}
FEEDS = {
    "swiglu": LayerKind(
        lambda c, file, p, layer: swiglu_tensors(c, p), lambda c, w, p, layer: FeedForward(w, p, c.eps, layer.feed_norm)
    ),
    "relu2": LayerKind(
        lambda c, file, p, layer: relu2_tensors(c, p), lambda c, w, p, layer: Relu2(w, p, c.eps, layer.feed_norm)
    ),
    "moe": LayerKind(
        _moe_tensors,
        lambda c, w, p, layer: MoeFeed(w, p, layer.moe, c.eps, layer.feed_norm),
    ),
}


class Block:
    """A mixer, then a feed-forward, as far as the layer has them; each adds to the residual stream behind its norm."""

    def __init__(self, c: DecoderConfig, w: Weights, p: str, rope: Rope, layer: Layer, kv: torch.dtype) -> None:
        self.mixer: Mixer | None = MIXERS[layer.mixer].build(c, w, p, rope, kv) if layer.mixer else None
        self.feed: Feed | None = FEEDS[layer.feed].build(c, w, p, layer) if layer.feed else None
        self.parts = [part for part in (self.mixer, self.feed) if part is not None]
        self.capturable = all(part.capturable for part in self.parts)
        self.captures_prompts = self.capturable and all(part.captures_prompts for part in self.parts)

    def __call__(self, x: Tensor, angles: Angles, memory: Memory, layer: int, batch: Batch) -> Tensor:
        if self.mixer is not None:
            x = self.mixer(x, angles, memory, layer, batch)
        return x if self.feed is None else self.feed(x)


class Decoder:
    """The model bound to its memory. Implements `Target`."""

    def __init__(self, config: DecoderConfig, weights: Weights, memory: Memory) -> None:
        self.config, self.memory, self.device = config, memory, weights.device
        own, self.ranks = config.share(weights.n_rank), weights.ranks
        self.lead: Lead | None = None
        divisors = weights.optional("rope_freqs.weight")
        self.rope = Rope(
            config.n_rot, config.rope_base, config.rope_neox, weights.device, config.rope_scaling, divisors
        )
        self.embedding = weights.embedding("token_embd.weight")
        self.blocks = [
            Block(own, weights, f"blk.{i}", self.rope, layer, memory.kv_dtype) for i, layer in enumerate(own.layers)
        ]
        if self.ranks is not None:
            parts = [part for block in self.blocks for part in block.parts]
            fuse.link(self.ranks, [(last.gives, next.reads) for last, next in pairwise(parts)])
        for i, state in memory.states.items():
            state.fold = self.blocks[i].mixer.fold  # type: ignore[union-attr]  # recurrent mixers have one
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
        return self.ranks is None and not EXACT.is_on and all(block.captures_prompts for block in self.blocks)

    @property
    def n_vocab(self) -> int:
        return self.config.n_vocab

    @property
    def n_embd(self) -> int:
        return self.config.n_embd

    @property
    def n_layer(self) -> int:
        return self.config.n_layer

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        return self.output(hidden)

    def forward(self, batch: Batch, taps: Sequence[int] = ()) -> Out:
        if self.lead is not None:
            return self.lead.forward(self.run, batch, taps)
        return self.run(batch, taps).whole()

    @torch.inference_mode()
    def run(self, batch: Batch, taps: Sequence[int] = ()) -> Out:
        """A forward of this rank; `forward` has the others run theirs."""
        x, angles = self.rope.embedded(self.embedding, batch.tokens, batch.positions)
        tapped: dict[int, Tensor] = {}
        for i, block in enumerate(self.blocks):
            x = block(x, angles, self.memory, i, batch)
            if i in taps:
                tapped[i] = x
        hidden, wanted = self.norms.picked(x, self.norm, batch.out_rows)
        return out_of(self.output, wanted, hidden, torch.cat([tapped[i] for i in taps], -1) if taps else None)
