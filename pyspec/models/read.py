"""Reading that architectures share, with llama.cpp's rules for absent keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from pyspec.errors import BadTensors, ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, pair
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.model import ModelSpec
from pyspec.models.part import AttentionShape, PartSpec
from pyspec.models.rope import RopeSpec, read_scaling
from pyspec.models.wants import EMBEDDING
from pyspec.ranges import Whole


def read_gqa(
    file: GGUFFile,
    *,
    neox: bool,
    qk_norm: bool = False,
    biased: bool = False,
    feed: PartSpec | None = None,
    n_ff: int | None = None,
    rope: RopeSpec | None = None,
    feed_norm: str = "ffn_norm",
) -> ModelSpec:
    """A decoder whose blocks are attention and a feed-forward, all alike. feed: in place of a gated one; n_ff: its inner values;
    rope: in place of the file's; feed_norm: the norm before the feed-forward."""
    shape = read_attention(file)
    n_ff = file.hparams.integer("feed_forward_length") if n_ff is None else n_ff
    rope = rope or read_rope(file, shape, neox=neox)
    attention = Attention(shape, rope, qk_norm=qk_norm, biased=biased)
    block = pair(attention, feed or Mlp(n_ff), feed_norm)
    return read_decoder(file, (block,) * block_count(file), n_ff)


def read_decoder(file: GGUFFile, blocks: Iterable[BlockSpec], n_ff: int, **own: Any) -> ModelSpec:
    """A decoder of these blocks, and the numbers that every file has. own: fields of `ModelSpec` that the architecture fixes."""
    h = file.hparams
    if "eps" not in own:
        own["eps"] = h.number("attention.layer_norm_rms_epsilon")
    return ModelSpec(
        arch=file.architecture,
        n_vocab=vocab_size(file),
        n_embd=h.integer("embedding_length"),
        n_ff=n_ff,
        n_ctx_train=h.integer("context_length"),
        blocks=tuple(blocks),
        **own,
    )


def read_rope(
    file: GGUFFile, shape: AttentionShape, *, neox: bool, reads_ramp: bool = False
) -> RopeSpec:
    """The rope of heads of this shape. reads_ramp: of the architecture's YaRN more keys are read (`read_scaling`)."""
    h = file.hparams
    n_rot = h.integer("rope.dimension_count", shape.head_dim)
    check_rope(n_rot, shape.head_dim)
    scaling = read_scaling(file, reads_ramp=reads_ramp)
    return RopeSpec(n_rot, h.number("rope.freq_base", 10000.0), neox, scaling)


def read_axes(file: GGUFFile, rope: RopeSpec) -> RopeSpec:
    """The rope with sections of a file that must have them. ModelError where they do not cover all frequencies."""
    sections = file.hparams.each("rope.dimension_sections", 4)
    if 2 * sum(sections) < rope.n_rot:
        raise ModelError(f"rope sections {sections[:8]} cover fewer than {rope.n_rot // 2} frequencies")
    return replace(rope, axes=tuple(sections[:3]))


def has_axes(file: GGUFFile) -> bool:
    """Whether the rope has sections, as models with pictures do: it then pairs halves, also where the architecture's others pair neighbours."""
    key = "rope.dimension_sections"
    return key in file.hparams and all(file.hparams.each(key, 4)[:2])


def read_near_rope(file: GGUFFile, shape: AttentionShape, *, neox: bool, base: float = 0.0) -> RopeSpec:
    """The rope of blocks with a window, which nothing stretches. base: where the file has none; 0.0: that of the others"""
    h, far = file.hparams, read_rope(file, shape, neox=neox)
    n_rot = h.integer("rope.dimension_count_swa", far.n_rot)
    check_rope(n_rot, shape.head_dim)
    return RopeSpec(n_rot, h.number("rope.freq_base_swa", base or far.base), neox, divisors="")


def read_windows(
    file: GGUFFile,
    n_block: int,
    pattern: int,
    default: int | None = None,
    *,
    first_is_whole: bool = False,
) -> tuple[int, ...]:
    """The window of each block; 0: none. The file names the blocks, or a period whose last block has none (first_is_whole: whose first);
    `pattern` is its default, and `default` that of the window, which the file must have without one."""
    h, key, given = file.hparams, "attention.sliding_window_pattern", "attention.sliding_window"
    window = h.integer(given) if default is None else h.integer(given, default)
    if isinstance(h.metadata.get(h.key(key)), np.ndarray):
        has_window = h.flags(key, n_block, or_more=True)
    else:
        period = h.integer(key, pattern, legal=Whole(1, 1 << 16))
        whole = 0 if first_is_whole else period - 1
        has_window = [i % period != whole for i in range(n_block)]
    return tuple(window if has else 0 for has in has_window)


def read_attention(file: GGUFFile, *, gated: bool = False) -> AttentionShape:
    """Head counts and dimensions."""
    h = file.hparams
    n_head = h.integer("attention.head_count")
    return attention_shape(file, n_head, h.integer("attention.head_count_kv", n_head), gated=gated)


def attention_shape(file: GGUFFile, n_head: int, n_kv: int, *, gated: bool = False) -> AttentionShape:
    """The shape of attention of `n_head` heads and `n_kv` key heads."""
    h = file.hparams
    check_heads(file, n_head, n_kv)
    dim = h.integer("attention.key_length", h.integer("embedding_length") // n_head)
    if dim < 1:
        raise ModelError(f"{n_head} heads do not fit a width of {h.integer('embedding_length')}")
    if (v := h.integer("attention.value_length", dim)) != dim:
        raise ModelError(f"keys of {dim} and values of {v} dimensions are not supported together")
    return AttentionShape(n_head, n_kv, dim, gated, h.number("attention.scale", 0.0) or None)


def check_heads(file: GGUFFile, n_head: int, n_kv: int) -> None:
    """As many heads for each key head."""
    if n_head < 1 or n_kv < 1 or n_head % n_kv:
        prefix = file.hparams.prefix
        raise ModelError(
            f"{n_head} heads do not divide into {n_kv} key heads ({prefix}attention.head_count, head_count_kv)"
        )


def block_count(file: GGUFFile) -> int:
    """Blocks by the metadata, MTP blocks included. Each has a tensor at least: a false count is found before any list is made."""
    n, n_tensor = file.hparams.integer("block_count"), len(file.tensors)
    if n > n_tensor:
        raise ModelError(
            f"{file.hparams.key('block_count')} is {n}, and the file has {n_tensor} tensors"
        )
    return n


def read_kv_heads(file: GGUFFile, n_block: int) -> list[int]:
    """Key heads of each block: one number, one for each, or as many as heads."""
    h, key = file.hparams, "attention.head_count_kv"
    return h.each(key, n_block) if key in h else [h.integer("attention.head_count")] * n_block


def read_limits(
    file: GGUFFile, n_block: int, *, one_for_both: bool = False
) -> list[tuple[float, float]]:
    """Where activations of each block are cut, the experts' and the shared one's; 0: nowhere. one_for_both: the shared one's are the experts'
    in files that do not say"""
    plain = [0.0] * n_block
    own = _each_number(file, "swiglu_clamp_exp", plain)
    shared = _each_number(file, "swiglu_clamp_shexp", own if one_for_both else plain)
    return [(a if a > 1e-6 else 0.0, b if b > 1e-6 else 0.0) for a, b in zip(own, shared, strict=True)]


def _each_number(file: GGUFFile, name: str, default: list[float]) -> list[float]:
    """A number for each block, or one for all."""
    h, n = file.hparams, len(default)
    if name not in h:
        return default
    try:
        return [h.number(name)] * n
    except ModelError:
        if not isinstance(h.metadata[h.key(name)], np.ndarray):
            raise
        return h.numbers(name, n, or_more=True)


def split_gates(file: GGUFFile, n_block: int, n_ff: int) -> None:
    """Name the halves of `ffn_up` where that is gates and ups in one matrix, gates first."""
    for name in (f"blk.{i}.ffn_up.weight" for i in range(n_block)):
        if name in file.tensors and file.tensors[name].shape[0] == 2 * n_ff:
            file.split(name, (name.replace("ffn_up", "ffn_gate"), name))


def trunk_layers(file: GGUFFile) -> tuple[int, int]:
    """(blocks of the trunk, MTP blocks behind them). Where MTP was left out its block may be counted or not: the tensors decide."""
    n_block, n_nextn = block_count(file), file.hparams.integer("nextn_predict_layers", 0)
    if n_nextn >= n_block:
        a = file.hparams.prefix
        raise ModelError(
            f"{n_nextn} MTP blocks among {n_block} blocks ({a}nextn_predict_layers, block_count)"
        )
    norms = "attn", "hc_attn", "post_attention"
    last = (f"blk.{n_block - 1}.{x}_norm.weight" in file.tensors for x in norms)
    if n_nextn and not file.has_mtp and any(last):
        return n_block, 0
    return n_block - n_nextn, n_nextn


def check_rope(n_rot: int, head_dim: int) -> None:
    """Rope turns pairs of a head's dimensions."""
    if n_rot % 2 or n_rot > head_dim:
        raise ModelError(
            f"rope can not turn {n_rot} dimensions of heads of {head_dim}: want an even number of them"
        )


def vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding: the number of logits. They may be more than tokens, never fewer."""
    if EMBEDDING not in file.tensors:
        raise BadTensors(f"{EMBEDDING}: missing (is this a vocabulary-only or a sidecar file?)")
    n = file.tensors[EMBEDDING].shape[0]
    if (
        "tokenizer.ggml.tokens" in file.fields
        and len(tokens := file.fields.strings("tokenizer.ggml.tokens")) > n
    ):
        raise BadTensors(f"{EMBEDDING} has {n} rows for {len(tokens)} tokens")
    return n
