"""Metadata and tensors of each architecture, by its dimensions. A new architecture is one entry of ARCHITECTURES."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from pyspec.gguf import ValueType
from pyspec.synth import decoders, gemma4
from pyspec.synth.shapes import DFlashDims, Dims, EagleDims, StagesDims
from pyspec.synth.trunks import (
    HEAD_MIX,
    U32,
    Key,
    Parts,
    Spec,
    attention,
    common,
    deepseek4_block,
    deepseek4_metadata,
    deepseek4_tensors,
    feed_forward,
    file_arch,
    mixers,
    moe_metadata,
    nemotron_metadata,
    nemotron_tensors,
    plain_metadata,
    plain_tensors,
    qwen35_metadata,
    qwen35_tensors,
    qwen35moe_metadata,
)

__all__ = ["ARCHITECTURES", "Key", "Parts", "Spec", "file_arch", "metadata", "parts_of", "tensors"]

DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
OF_COMPRESSED = ("indexer.", "rope.scaling.", "compress_rope_")  # keys that stages have no use for


def parts_of(dims: Dims, *, mtp: bool = True, sidecar: bool = False) -> Parts:
    """The parts in a file of this model, or in its sidecar."""
    return Parts(trunk=not sidecar, mtp=mtp and dims.mtp and (sidecar or not dims.mtp_alone))


def metadata(dims: Dims, parts: Parts) -> Iterator[Key]:
    """All keys except general.* and tokenizer.*."""
    return ARCHITECTURES[dims.arch][0](dims, parts)


def tensors(dims: Dims, parts: Parts) -> Iterator[Spec]:
    return ARCHITECTURES[dims.arch][1](dims, parts)


def _dflash_metadata(dims: Dims, parts: Parts) -> Iterator[Key]:
    if isinstance(dims, StagesDims):
        yield from _stages_metadata(dims)
        return
    assert isinstance(dims, DFlashDims)
    a = file_arch(dims)
    yield from common(dims, dims.n_layer)
    if dims.fork:
        yield f"{a}.rope.dimension_count", dims.head_dim, U32
        yield f"{a}.attention.causal", False, ValueType.BOOL
        yield f"{a}.dflash.block_size", dims.block, U32
        yield f"{a}.dflash.mask_token_id", dims.mask_id, U32
        yield f"{a}.dflash.target_layer_ids", list(dims.taps), U32
        yield f"{a}.dflash.n_target_features", len(dims.taps) * dims.n_target_embd, U32
    else:
        yield f"{a}.block_size", dims.block, U32
        yield f"{a}.target_layers", [tap + 1 for tap in dims.taps], U32
        yield "tokenizer.ggml.mask_token_id", dims.mask_id, U32
        if dims.mrope:
            yield f"{a}.rope.dimension_sections", [dims.head_dim // 2, 0, 0, 0], ValueType.INT32
    if dims.window:
        yield f"{a}.attention.sliding_window", dims.window, U32
        yield f"{a}.attention.sliding_window_pattern", list(dims.sliding), ValueType.BOOL
    if dims.kind == "dflash2":
        for name, number in zip(DFLASH2, (*dims.conv, *dims.selector), strict=True):
            yield f"{a}.{name}", number, U32
    if dims.kind == "dspark":
        yield f"{a}.sample_from_anchor", True, ValueType.BOOL
        yield f"{a}.has_confidence_head", True, ValueType.BOOL


def _stages_metadata(dims: StagesDims) -> Iterator[Key]:
    for key in deepseek4_metadata(dims, Parts()):
        if not any(part in key[0] for part in OF_COMPRESSED):
            yield key
    yield "dflash.block_size", dims.block, U32
    yield "dflash.target_layers", [tap + 1 for tap in dims.taps], U32
    yield "tokenizer.ggml.mask_token_id", dims.mask_id, U32
    for name in ("sample_from_anchor", "has_confidence_head"):
        yield f"dflash.{name}", True, ValueType.BOOL


def _eagle3_metadata(dims: Dims, parts: Parts) -> Iterator[Key]:
    assert isinstance(dims, EagleDims)
    yield from common(dims, dims.n_layer)
    yield "eagle3.rope.dimension_count", dims.head_dim, U32
    yield "eagle3.target_layers", list(dims.inputs), U32
    yield "eagle3.target_hidden_size", dims.n_target_embd, U32
    for name in ("norm_before_residual", "norm_before_fc"):
        yield f"eagle3.{name}", False, ValueType.BOOL


def _dflash_tensors(dims: Dims, parts: Parts) -> Iterator[Spec]:
    if isinstance(dims, StagesDims):
        yield from _stages_tensors(dims)
        return
    assert isinstance(dims, DFlashDims)
    n = dims.n_embd
    name = "dflash_fc.weight" if dims.fork else "fc.weight"
    yield Spec(name, (n, len(dims.taps) * dims.n_target_embd), "matrix")
    yield Spec("dflash_hidden_norm.weight" if dims.fork else "enc.output_norm.weight", (n,), "norm")
    yield Spec("output_norm.weight", (n,), "norm")
    for p in (f"blk.{i}" for i in range(dims.n_layer)):
        yield Spec(f"{p}.attn_norm.weight", (n,), "norm")
        yield from attention(dims, p)
        yield from feed_forward(dims, p, "post_attention_norm" if dims.fork else "ffn_norm")
        if dims.kind == "dflash2":
            yield from _convolutions(dims, p)
    if dims.kind == "dflash2":
        rank = dims.selector[0]
        yield Spec("selector_hidden.weight", (rank, n), "matrix")
        yield Spec("selector_predecessor.weight", (dims.n_vocab, rank), "matrix")
        yield Spec("selector_successor.weight", (dims.n_vocab, rank), "matrix")
    if dims.kind == "dspark":
        yield from _markov(dims, dims.markov)


def _markov(dims: Dims, rank: int) -> Iterator[Spec]:
    """DSpark's heads."""
    yield Spec("markov_w1.weight", (dims.n_vocab, rank), "matrix")
    yield Spec("markov_w2.weight", (dims.n_vocab, rank), "matrix")
    yield Spec("conf_proj.weight", (1, dims.n_embd + rank), "router")
    yield Spec("conf_proj.bias", (1,), "router")


def _convolutions(dims: DFlashDims, p: str) -> Iterator[Spec]:
    """Those of an attention and of a feed-forward."""
    n_tap, group = dims.conv
    for name in (f"{p}.attn_conv", f"{p}.ffn_conv"):
        yield Spec(f"{name}_base", (2, n_tap, dims.n_embd), "conv")
        yield Spec(f"{name}_proj.weight", (2 * n_tap * (dims.n_embd // group), dims.n_embd), "gate", 0.3)


def _eagle3_tensors(dims: Dims, parts: Parts) -> Iterator[Spec]:
    """The attention reads a token's row and a state side by side."""
    assert isinstance(dims, EagleDims)
    n, p = dims.n_embd, "blk.0"
    yield Spec("fc.weight", (n, len(dims.inputs) * dims.n_target_embd), "matrix")
    yield Spec(f"{p}.attn_norm.weight", (n,), "norm")
    yield Spec(f"{p}.attn_norm_2.weight", (n,), "norm")
    for spec in attention(dims, p, qk_norm=False):
        reads = spec.name != f"{p}.attn_output.weight"
        yield replace(spec, shape=(spec.shape[0], 2 * n)) if reads else spec
    yield from feed_forward(dims, p, "ffn_norm")
    yield Spec("output_norm.weight", (n,), "norm")
    yield Spec("output.weight", (dims.n_drafts, n), "head")
    yield Spec("d2t", (dims.n_drafts,), "choice", dims.n_vocab)


def _stages_tensors(dims: StagesDims) -> Iterator[Spec]:
    n = dims.n_embd
    yield Spec("fc.weight", (n, len(dims.taps) * n), "matrix")
    yield Spec("enc.output_norm.weight", (n,), "norm")
    yield Spec("output_norm.weight", (n,), "norm")
    yield from mixers(dims, HEAD_MIX, dims.n_stream, 1)
    for i in range(dims.n_layer):
        yield from deepseek4_block(dims, i)
    yield from _markov(dims, dims.markov)


Keys = Callable[[Dims, Parts], Iterator[Key]]
Specs = Callable[[Dims, Parts], Iterator[Spec]]
ARCHITECTURES: dict[str, tuple[Keys, Specs]] = {
    "llama": (plain_metadata, plain_tensors),
    "qwen3": (plain_metadata, plain_tensors),
    "qwen3moe": (moe_metadata, plain_tensors),
    "gpt-oss": (moe_metadata, plain_tensors),
    "qwen35": (qwen35_metadata, qwen35_tensors),
    "qwen35moe": (qwen35moe_metadata, qwen35_tensors),
    "qwen3next": (qwen35moe_metadata, qwen35_tensors),
    "nemotron_h": (nemotron_metadata, nemotron_tensors),
    "nemotron_h_moe": (nemotron_metadata, nemotron_tensors),
    "deepseek4": (deepseek4_metadata, deepseek4_tensors),
    "gemma4": (gemma4.metadata, gemma4.tensors),
    "dflash": (_dflash_metadata, _dflash_tensors),
    "eagle3": (_eagle3_metadata, _eagle3_tensors),
}
"""Metadata and tensors by architecture."""
ARCHITECTURES |= dict.fromkeys(decoders.KINDS, (decoders.metadata, decoders.tensors))
