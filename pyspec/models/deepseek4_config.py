"""`deepseek4` (DeepSeek-V4 Flash and Pro): its metadata and its tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.blocks.attention import SINKS
from pyspec.models.blocks.moe import Experts
from pyspec.models.cuts import Cut, Units
from pyspec.models.part import AttentionShape, LoadTypes, Place, Request
from pyspec.models.read import check_rope, trunk_layers, vocab_size
from pyspec.models.spec import head_tensor
from pyspec.models.target import MtpSpec, Target
from pyspec.models.wants import Want
from pyspec.models.weights import EMBEDDING, HEAD, Weights
from pyspec.ranges import quoted
from pyspec.slots.memory import Memory
from pyspec.slots.parts import LayerParts, Paged, Ring

# Tokens of a compressed row. An indexer chooses among the overlapping blocks of CSA; all plain blocks of HCA count.
CSA, HCA = 4, 128
SQRT_SOFTPLUS = 4  # expert_gating_func
WINDOW, ROWS, PARTIAL, INDEX, INDEX_PARTIAL = "window", "rows", "partial", "index", "index_partial"  # names of parts


@dataclass(frozen=True, slots=True)
class IndexerShape:
    n_head: int
    dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class StreamsShape:
    """Residual streams: how many, and the numbers of their mixing."""

    n: int
    n_iter: int
    floor: float


@dataclass(frozen=True, slots=True)
class YarnShape:
    """Rope of layers with compressed rows."""

    base: float
    factor: float
    n_ctx_orig: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, kw_only=True)
class Deepseek4Config:
    """Everything the forward needs to know, read from metadata and checked.

    ratios  of each block, the MTP block's behind the trunk's: tokens of a compressed row, 0 for none
    limits  of each block: where the experts' activations are cut, and the shared expert's
    n_hash  layers whose experts a table of tokens names
    """

    arch: str
    n_vocab: int
    n_embd: int
    n_layer: int
    n_nextn: int
    n_ctx_train: int
    eps: float
    heads: AttentionShape
    n_rot: int
    rope_base: float
    yarn: YarnShape
    q_rank: int
    n_group: int
    out_rank: int
    window: int
    ratios: tuple[int, ...]
    indexer: IndexerShape
    streams: StreamsShape
    moe: Experts
    limits: tuple[tuple[float, float], ...]
    n_hash: int

    @property
    def n_ff(self) -> int:
        """Inner values of a row."""
        return self.moe.n_used * self.moe.n_ff + self.moe.n_ff_shared

    @property
    def n_hidden(self) -> int:
        """Width of the hidden states that an MTP block reads: all streams."""
        return self.streams.n * self.n_embd

    @property
    def attention(self) -> tuple[AttentionShape, ...]:
        return (self.heads,)

    @property
    def captures_prompts(self) -> bool:
        return False  # its attention of many rows has counts of the host

    @property
    def mtp(self) -> MtpSpec:
        """The MTP block behind the trunk."""
        from pyspec.models.mtp_streams import MtpOfStreams  # which needs the configuration

        return MtpOfStreams(self)

    def requests(self, file: GGUFFile, on: LoadTypes) -> Iterator[Request]:
        """None: its blocks' ops are compiled and checked when they are bound."""
        return iter(())

    def freq(self, ratio: int) -> torch.Tensor:
        """Angles of a position's rope in a layer of this ratio. [n_rot / 2] f64"""
        y, n = self.yarn, self.n_rot
        base = y.base if ratio else self.rope_base
        freq = base ** (-torch.arange(0, n, 2, dtype=torch.float64) / n)
        if not ratio or y.factor <= 1.0:
            return freq

        def turns(beta: float) -> float:
            return n * math.log(y.n_ctx_orig / (beta * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(0.0, math.floor(turns(y.beta_fast))), min(n - 1.0, math.ceil(turns(y.beta_slow)))
        ramp = ((torch.arange(n // 2, dtype=torch.float64) - low) / max(0.001, high - low)).clamp(0, 1)
        return freq * (1 - ramp) + freq / y.factor * ramp

    def build(self, weights: Weights, memory: Memory) -> Target:
        """The model, bound to its memory."""
        from pyspec.models.deepseek4 import Deepseek4  # which needs the configuration

        return Deepseek4(self, weights, memory)

    def parts(self) -> list[LayerParts]:
        """Memory of each trunk layer for its slots."""
        return [self.layer_parts(ratio) for ratio in self.ratios[: self.n_layer]]

    def scratch_bytes(self, n_row: int, n_token: int, kv: torch.dtype, device: torch.device) -> int:
        """Of heads, streams, and partial sums of kernels."""
        from pyspec.models.deepseek4_scratch import scratch_bytes  # which needs the configuration

        return scratch_bytes(self, n_row, n_token, kv, device)

    def layer_parts(self, ratio: int) -> LayerParts:
        """A window of raw rows; the compressed rows, and the values of tokens whose block is not complete."""
        dim = self.heads.head_dim
        parts: dict[str, Paged | Ring] = {WINDOW: Ring(self.window, {ROWS: (dim,)}, dtype=None)}
        if ratio:
            parts |= _compressed(ratio, dim, ROWS, PARTIAL)
        if ratio == CSA:
            parts |= _compressed(ratio, self.indexer.dim, INDEX, INDEX_PARTIAL)
        return parts

    def share(self, n: int) -> Deepseek4Config:
        """The model of each of `n` ranks: heads by the groups of their outputs, and inner widths of experts. All heads share one key, so
        each rank has all keys, compressed rows and choices; the streams are the same on all ranks."""
        if n == 1:
            return self
        return replace(self, heads=self.heads.share(n), n_group=self.n_group // n, moe=self.moe.share(n))

    def tensors(self, file: GGUFFile) -> dict[str, Want]:
        """The whole manifest of the trunk."""
        n, s = self.n_embd, self.streams.n
        wants = {
            EMBEDDING: Want((self.n_vocab, n)),
            "output_norm.weight": Want((n,)),
            HEAD: head_tensor(self.n_vocab, n),
            **mix_tensors("output_hc", s * n, s, 1),
        }
        for i, ratio in enumerate(self.ratios[: self.n_layer]):
            wants |= self.block_tensors(file, f"blk.{i}", ratio, is_hashed=i < self.n_hash)
        return wants

    def block_tensors(self, file: GGUFFile, p: str, ratio: int, *, is_hashed: bool = False) -> dict[str, Want]:
        """Wanted tensors of one block with prefix `p` (blk.N)."""
        n, s, a = self.n_embd, self.streams.n, self.heads
        inner, groups = a.n_head * a.head_dim, (Units(self.n_group, "groups of heads"),)
        wants = {
            f"{p}.attn_norm.weight": Want((n,)),
            f"{p}.ffn_norm.weight": Want((n,)),
            **mix_tensors(f"{p}.hc_attn", s * n, (2 + s) * s, 3),
            **mix_tensors(f"{p}.hc_ffn", s * n, (2 + s) * s, 3),
            f"{p}.{SINKS}": Want((a.n_head,), cut=Cut(0, groups)),
            f"{p}.attn_q_a.weight": Want((self.q_rank, n)),
            f"{p}.attn_q_a_norm.weight": Want((self.q_rank,)),
            f"{p}.attn_q_b.weight": Want((inner, self.q_rank), cut=Cut(0, groups)),
            f"{p}.attn_kv.weight": Want((a.head_dim, n)),
            f"{p}.attn_kv_a_norm.weight": Want((a.head_dim,)),
            f"{p}.attn_output_a.weight": Want(
                (self.n_group * self.out_rank, inner // self.n_group), cut=Cut(0, groups)
            ),
            f"{p}.attn_output_b.weight": Want((n, self.n_group * self.out_rank), cut=Cut(1, groups)),
        }
        if ratio:
            wants |= compressor_tensors(f"{p}.attn_compressor", n, a.head_dim, ratio)
        if ratio == CSA:
            x = self.indexer
            wants |= compressor_tensors(f"{p}.indexer_compressor", n, x.dim, ratio)
            wants[f"{p}.indexer.proj.weight"] = Want((x.n_head, n))
            wants[f"{p}.indexer.attn_q_b.weight"] = Want((x.n_head * x.dim, self.q_rank))
        wants |= self.moe.tensors(Place(file, p, n, self.eps))
        if is_hashed:
            wants[f"{p}.ffn_gate_tid2eid.weight"] = Want((self.n_vocab, self.moe.n_used), whole=True)
        return wants


def _compressed(ratio: int, dim: int, rows: str, partial: str) -> dict[str, Paged | Ring]:
    """A row for every `ratio` tokens, and a ring of the values and scores of tokens whose row is not complete."""
    of = 1 + (ratio == CSA)
    ring = Ring(of * ratio, {"values": (of * dim,), "scores": (of * dim,)})
    return {rows: Paged(1, dim, tokens_per_row=ratio, keys_only=True), partial: ring}


def mix_tensors(name: str, n_in: int, n_out: int, n_scale: int) -> dict[str, Want]:
    """Wanted tensors of coefficients that mix streams."""
    return {
        f"{name}_fn.weight": Want((n_out, n_in)),
        f"{name}_base.weight": Want((n_out,)),
        f"{name}_scale.weight": Want((n_scale,)),
    }


def compressor_tensors(name: str, n_embd: int, dim: int, ratio: int) -> dict[str, Want]:
    """Wanted tensors of a compressor."""
    width = dim * (1 + (ratio == CSA))
    return {
        f"{name}_kv.weight": Want((width, n_embd)),
        f"{name}_gate.weight": Want((width, n_embd)),
        f"{name}_ape.weight": Want((ratio, width)),
        f"{name}_norm.weight": Want((dim,)),
    }


# -- from a file -----------------------------------------------------------------------------------------------------


def read(file: GGUFFile) -> Deepseek4Config:
    h = file.hparams
    n_layer, n_nextn = trunk_layers(file)
    n_block = n_layer + n_nextn
    heads = _attention(file)
    n_rot = h.integer("rope.dimension_count")
    check_rope(n_rot, heads.head_dim)
    n_group = h.integer("attention.output_group_count")
    if heads.n_head % n_group:
        raise ModelError(
            f"{heads.n_head} heads do not divide into {n_group} groups ({h.key('attention.output_group_count')})"
        )
    indexer = IndexerShape(*(h.integer(f"attention.indexer.{name}") for name in ("head_count", "key_length", "top_k")))
    check_rope(n_rot, indexer.dim)
    return Deepseek4Config(
        arch=file.architecture,
        n_vocab=vocab_size(file),
        n_embd=h.integer("embedding_length"),
        n_layer=n_layer,
        n_nextn=n_nextn,
        n_ctx_train=h.integer("context_length"),
        eps=h.number("attention.layer_norm_rms_epsilon"),
        heads=heads,
        n_rot=n_rot,
        rope_base=h.number("rope.freq_base"),
        yarn=_yarn(file),
        q_rank=h.integer("attention.q_lora_rank"),
        n_group=n_group,
        out_rank=h.integer("attention.output_lora_rank"),
        window=_window(file),
        ratios=_ratios(file, n_block),
        indexer=indexer,
        streams=StreamsShape(
            h.integer("hyper_connection.count"),
            h.integer("hyper_connection.sinkhorn_iterations"),
            h.number("hyper_connection.epsilon"),
        ),
        moe=_moe(file),
        limits=limits_of(file, n_block),
        n_hash=h.integer("hash_layer_count", 0),
    )


def _attention(file: GGUFFile) -> AttentionShape:
    h = file.hparams
    n_head, dim = h.integer("attention.head_count"), h.integer("attention.key_length")
    if n_head < 1 or h.integer("attention.head_count_kv", 1) != 1:
        raise ModelError(
            f"{n_head} heads over {h.integer('attention.head_count_kv', 1)} key heads: this architecture has one"
        )
    if (value := h.integer("attention.value_length", dim)) != dim:
        raise ModelError(f"keys of {dim} dimensions are the values, too, and those have {value}")
    return AttentionShape(n_head, 1, dim)


def _window(file: GGUFFile) -> int:
    window = file.hparams.integer("attention.sliding_window")
    if not 1 <= window <= 1 << 16:
        raise ModelError(
            f"a window of {window} tokens ({file.hparams.key('attention.sliding_window')}); want 1 to 65536"
        )
    return window


def _ratios(file: GGUFFile, n_block: int) -> tuple[int, ...]:
    h = file.hparams
    ratios = h.integers("attention.compress_ratios")
    if len(ratios) < n_block:
        raise ModelError(
            f"{h.key('attention.compress_ratios')} has {len(ratios)} entries; want one for each of {n_block} blocks"
        )
    if wrong := sorted(set(ratios[:n_block]) - {0, CSA, HCA}):
        raise ModelError(f"{h.key('attention.compress_ratios')} holds {wrong[:4]}; want 0, {CSA} or {HCA}")
    return tuple(ratios[:n_block])


def _yarn(file: GGUFFile) -> YarnShape:
    h = file.hparams
    factor = h.number("rope.scaling.factor", h.number("rope.scale_linear", 0.0)) or 1.0
    kind = h.label("rope.scaling.type", "none" if factor == 1.0 else "linear")  # as llama.cpp: a factor alone is linear
    if kind not in ("none", "yarn"):
        raise ModelError(f"rope scaling {quoted(kind)} is not supported (none and yarn are)")
    return YarnShape(
        h.number("attention.compress_rope_freq_base"),
        factor if kind == "yarn" else 1.0,
        h.integer("rope.scaling.original_context_length", h.integer("context_length")),
        h.number("rope.scaling.yarn_beta_fast", 32.0),
        h.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _moe(file: GGUFFile) -> Experts:
    h = file.hparams
    if (func := h.integer("expert_gating_func", SQRT_SOFTPLUS)) != SQRT_SOFTPLUS:
        raise ModelError(
            f"{h.key('expert_gating_func')} is {func}; this architecture scores by sqrt(softplus), {SQRT_SOFTPLUS}"
        )
    if h.integer("expert_group_count", 0) > 1:
        raise ModelError(f"experts in groups are not supported ({h.key('expert_group_count')})")
    widths = sorted(set(h.one_or_more("expert_feed_forward_length")))
    if len(widths) != 1:
        raise ModelError(f"{h.key('expert_feed_forward_length')} has blocks of different sizes: {widths[:8]}")
    return Experts(
        n_expert=h.integer("expert_count"),
        n_used=h.integer("expert_used_count"),
        n_ff=widths[0],
        n_ff_shared=widths[0] * h.integer("expert_shared_count", 0),
        router="sqrtsoftplus",
        renorm=h.flag("expert_weights_norm", True),
        scale=h.number("expert_weights_scale", 1.0) or 1.0,
    )


def limits_of(file: GGUFFile, n_block: int) -> tuple[tuple[float, float], ...]:
    """Where activations are cut in each block: the experts', and the shared expert's; 0 where they are not."""
    own = _each_number(file, "swiglu_clamp_exp", [0.0] * n_block)
    shared = _each_number(file, "swiglu_clamp_shexp", own)
    return tuple((a if a > 1e-6 else 0.0, b if b > 1e-6 else 0.0) for a, b in zip(own, shared, strict=True))


def _each_number(file: GGUFFile, name: str, default: list[float]) -> list[float]:
    """A number for each block, or one for all."""
    h, n = file.hparams, len(default)
    if name not in h:
        return default
    try:
        return [h.number(name)] * n
    except ModelError:
        return h.numbers(name, n)
