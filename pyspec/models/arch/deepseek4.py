"""`deepseek4` (DeepSeek-V4 Flash and Pro): several residual streams, attention over a window and compressed rows, and experts."""

from __future__ import annotations

from dataclasses import replace

from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, Mix, Part
from pyspec.models.blocks.compressor import CSA, HCA
from pyspec.models.blocks.sparse_attention import IndexerShape, SparseAttention, TailRope
from pyspec.models.blocks.stream_experts import StreamExperts
from pyspec.models.model import ModelSpec
from pyspec.models.part import AttentionShape, PartSpec
from pyspec.models.read import check_rope, read_decoder, read_limits, trunk_layers, vocab_size
from pyspec.models.residual import Residual
from pyspec.ranges import Whole, quoted

SQRT_SOFTPLUS = 4  # expert_gating_func


def read(file: GGUFFile) -> ModelSpec:
    h = file.hparams
    n_layer, n_nextn = trunk_layers(file)
    n_block, n_hash = n_layer + n_nextn, h.integer("hash_layer_count", 0)
    n_vocab, experts, residual = vocab_size(file), read_experts(file), read_residual(file)
    mixers, limits = _mixers(file), read_limits(file, n_block, one_for_both=True)
    feeds = [
        replace(experts, limits=limits[i], n_named=n_vocab if i < n_hash else 0) for i in range(n_layer)
    ]
    blocks = (
        stream_block(mixers[ratio], feed, residual.n)
        for ratio, feed in zip(_ratios(file, n_block), feeds, strict=False)
    )
    return read_decoder(
        file,
        blocks,
        experts.n_inner,
        n_nextn=n_nextn,
        mtp_block=stream_block(replace(mixers[0], in_pages=True), experts, residual.n),
        residual=residual,
        ties_head=False,
    )


def read_residual(file: GGUFFile) -> Residual:
    """Several streams."""
    h = file.hparams
    return Residual(
        h.integer("hyper_connection.count"),
        h.integer("hyper_connection.sinkhorn_iterations"),
        h.number("hyper_connection.epsilon"),
    )


def stream_block(mixer: PartSpec, feed: PartSpec, n_stream: int) -> BlockSpec:
    """A block between streams."""
    mixes = Mix("hc_attn", n_stream), Mix("hc_ffn", n_stream)
    return BlockSpec((Part("attn_norm", mixer, mix=mixes[0]), Part("ffn_norm", feed, mix=mixes[1])))


def read_mixer(file: GGUFFile) -> SparseAttention:
    """The mixer of blocks without compressed rows."""
    h, heads = file.hparams, _heads(file)
    n_rot, n_group = h.integer("rope.dimension_count"), h.integer("attention.output_group_count")
    check_rope(n_rot, heads.head_dim)
    if heads.n_head % n_group:
        raise ModelError(
            f"{heads.n_head} heads do not divide into {n_group} groups ({h.key('attention.output_group_count')})"
        )
    return SparseAttention(
        attends=heads,
        rope=TailRope(n_rot, h.number("rope.freq_base")),
        q_rank=h.integer("attention.q_lora_rank"),
        n_group=n_group,
        out_rank=h.integer("attention.output_lora_rank"),
        window=h.integer("attention.sliding_window", legal=Whole(1, 1 << 16)),
    )


def _mixers(file: GGUFFile) -> dict[int, SparseAttention]:
    """The mixer of blocks with each ratio."""
    plain, n_rot = read_mixer(file), file.hparams.integer("rope.dimension_count")
    every = replace(plain, rope=_compressed_rope(file, n_rot), ratio=HCA)
    return {0: plain, HCA: every, CSA: replace(every, ratio=CSA, indexer=read_indexer(file, n_rot))}


def _heads(file: GGUFFile) -> AttentionShape:
    h = file.hparams
    n_head, dim = h.integer("attention.head_count"), h.integer("attention.key_length")
    if n_head < 1 or h.integer("attention.head_count_kv", 1) != 1:
        raise ModelError(
            f"{n_head} heads over {h.integer('attention.head_count_kv', 1)} key heads: this architecture has one"
        )
    if (value := h.integer("attention.value_length", dim)) != dim:
        raise ModelError(f"keys of {dim} dimensions are the values, too, and those have {value}")
    return AttentionShape(n_head, 1, dim)


def _ratios(file: GGUFFile, n_block: int) -> tuple[int, ...]:
    h = file.hparams
    ratios = h.integers("attention.compress_ratios")
    if len(ratios) < n_block:
        raise ModelError(
            f"{h.key('attention.compress_ratios')} has {len(ratios)} entries; want one for each of {n_block} blocks"
        )
    if wrong := sorted(set(ratios[:n_block]) - {0, CSA, HCA}):
        raise ModelError(
            f"{h.key('attention.compress_ratios')} holds {wrong[:4]}; want 0, {CSA} or {HCA}"
        )
    return tuple(ratios[:n_block])


def read_indexer(file: GGUFFile, n_rot: int) -> IndexerShape:
    """An indexer whose heads turn `n_rot` dimensions."""
    h = file.hparams
    indexer = IndexerShape(
        *(h.integer(f"attention.indexer.{name}") for name in ("head_count", "key_length", "top_k"))
    )
    check_rope(n_rot, indexer.dim)
    return indexer


def _compressed_rope(file: GGUFFile, n_rot: int) -> TailRope:
    """Of blocks with compressed rows."""
    h = file.hparams
    factor = h.number("rope.scaling.factor", h.number("rope.scale_linear", 0.0)) or 1.0
    # As llama.cpp: a factor alone is linear
    kind = h.label("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if kind not in ("none", "yarn"):
        raise ModelError(f"rope scaling {quoted(kind)} is not supported (none and yarn are)")
    return TailRope(
        n_rot,
        h.number("attention.compress_rope_freq_base"),
        factor if kind == "yarn" else 1.0,
        h.integer("rope.scaling.original_context_length", h.integer("context_length")),
        h.number("rope.scaling.yarn_beta_fast", 32.0),
        h.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def read_experts(file: GGUFFile) -> StreamExperts:
    """The feed-forward, without the limits of a block."""
    h = file.hparams
    if (func := h.integer("expert_gating_func", SQRT_SOFTPLUS)) != SQRT_SOFTPLUS:
        raise ModelError(
            f"{h.key('expert_gating_func')} is {func}; this architecture scores by sqrt(softplus), {SQRT_SOFTPLUS}"
        )
    if h.integer("expert_group_count", 0) > 1:
        raise ModelError(f"experts in groups are not supported ({h.key('expert_group_count')})")
    widths = sorted(set(h.one_or_more("expert_feed_forward_length")))
    if len(widths) != 1:
        raise ModelError(
            f"{h.key('expert_feed_forward_length')} has blocks of different sizes: {widths[:8]}"
        )
    return StreamExperts(
        n_expert=h.integer("expert_count"),
        n_used=h.integer("expert_used_count"),
        n_ff=widths[0],
        n_ff_shared=widths[0] * h.integer("expert_shared_count", 0),
        router="sqrtsoftplus",
        renorm=h.flag("expert_weights_norm", True),
        scale=h.number("expert_weights_scale", 1.0) or 1.0,
    )
