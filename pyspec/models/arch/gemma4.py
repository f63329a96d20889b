"""`gemma4` (Gemma 4): blocks with a window and blocks without, of other head widths and ropes; norms before and behind every part.

Scores are not scaled. Values are normed, without weights; where a block has no matrix of values, they are the products of keys. The
stream behind a block is multiplied with a number of the file. There are three kinds:

    dense
    experts   beside the dense feed-forward, each behind norms of its own; the router has one, too
    E         blocks have inputs besides the stream, and the last blocks read keys and values of earlier ones
"""

from __future__ import annotations

from dataclasses import replace

from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.layer_input import LayerInput
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.blocks.moe import Experts
from pyspec.models.blocks.together import Together
from pyspec.models.model import ModelSpec
from pyspec.models.part import AttentionShape
from pyspec.models.per_layer import PerLayer
from pyspec.models.read import block_count, check_heads, check_rope, read_decoder
from pyspec.models.rope import DIVISORS, NOT_STRETCHED, RopeSpec, read_scaling

SCALE = "layer_output_scale.weight"
NEAR_BASE = 10_000.0  # of the rope of windows, where a file does not say
CAUSAL = 1536, 2560  # widths of E2B and E4B, whose rows of pictures see no later ones; no key says so
NEAR = "_swa"  # ends the keys of blocks with a window


def read(file: GGUFFile) -> ModelSpec:
    h, n_block = file.hparams, block_count(file)
    widths, experts = h.each("feed_forward_length", n_block), _experts(file)
    n_input = h.integer("embedding_length_per_layer_input", 0)
    blocks = []
    for i, (mixer, width) in enumerate(zip(_mixers(file, n_block), widths, strict=True)):
        parts = [Part("attn_norm", mixer, post="post_attention_norm"), _feed(width, experts)]
        if n_input:
            parts.append(Part("", LayerInput(i, n_input), post="post_norm"))
        blocks.append(BlockSpec(tuple(parts), scale=SCALE))
    spec = read_decoder(file, blocks, max(widths) + (experts.n_inner if experts else 0))
    inputs = PerLayer(n_block, n_input, spec.n_vocab, spec.n_embd, spec.eps)
    return replace(
        spec,
        embed_factor=spec.n_embd**0.5,
        final_cap=h.number("final_logit_softcapping", 0.0),
        per_layer=inputs if n_input else None,
        sees_pictures="" if spec.n_embd in CAUSAL else "near",
    )


def _experts(file: GGUFFile) -> Experts | None:
    h = file.hparams
    if not h.integer("expert_count", 0):
        return None
    return Experts(
        n_expert=h.integer("expert_count"),
        n_used=h.integer("expert_used_count"),
        n_ff=h.integer("expert_feed_forward_length"),
        act="geglu",
        router_norm="ffn_gate_inp.scale",
    )


def _feed(width: int, experts: Experts | None) -> Part:
    """The feed-forward of a block."""
    dense = Mlp(width, "gelu")
    if experts is None:
        return Part("ffn_norm", dense, post="post_ffw_norm")
    both = (
        Part("ffn_norm", dense, post="post_ffw_norm_1"),
        Part("pre_ffw_norm_2", experts, post="post_ffw_norm_2"),
    )
    return Part("", Together(BlockSpec(both)), post="post_ffw_norm")


def _mixers(file: GGUFFile, n_block: int) -> list[Attention]:
    """The attention of each block. The last ones may read the keys of the last block of their kind that has some."""
    h = file.hparams
    window = h.integer("attention.sliding_window")
    is_near = h.flags("attention.sliding_window_pattern", n_block, or_more=True)
    heads, kv_heads = (h.each(f"attention.head_count{x}", n_block) for x in ("", "_kv"))
    n_own = _own_keys(file, is_near)
    found: list[Attention] = []
    for i, (near, n_head, n_kv) in enumerate(zip(is_near, heads, kv_heads, strict=True)):
        shape, rope = read_kind(file, n_head, n_kv, near)
        reads = None if i < n_own else n_own - (2 if near else 1)
        if reads is not None and found[reads].shape.n_kv_head != n_kv:
            raise ModelError(
                f"block {i} has {n_kv} key heads, and block {reads}, whose keys it reads, "
                f"{found[reads].shape.n_kv_head}"
            )
        own = Attention(shape, rope, window if near else 0, qk_norm=True, norms_v=True)
        found.append(replace(own, may_share_keys=True, reads=reads))
    return found


def _own_keys(file: GGUFFile, is_near: list[bool]) -> int:
    """The number of blocks with keys of their own. The last two of them are one with a window and one without, where others read them."""
    n_shared, n_block = file.hparams.integer("attention.shared_kv_layers", 0), len(is_near)
    n_own, key = n_block - n_shared, file.hparams.key("attention.shared_kv_layers")
    if n_shared and n_own < 2:
        raise ModelError(f"{key} is {n_shared} of {n_block} blocks; want at most {n_block - 2}")
    if n_shared and is_near[n_own - 2 : n_own] != [True, False]:
        raise ModelError(
            f"{key} is {n_shared}: blocks {n_own - 2} and {n_own - 1}, whose keys the others read, "
            "have to be one with a window and one without"
        )
    return n_own


def read_kind(file: GGUFFile, n_head: int, n_kv: int, is_near: bool) -> tuple[AttentionShape, RopeSpec]:
    """Heads and rope of a block with a window, or without."""
    shape, rope = _shape(file, n_head, n_kv, is_near), _rope(file, is_near)
    check_rope(rope.n_rot, shape.head_dim)
    return shape, rope


def _shape(file: GGUFFile, n_head: int, n_kv: int, is_near: bool) -> AttentionShape:
    h, end = file.hparams, NEAR if is_near else ""
    check_heads(file, n_head, n_kv)
    dim = h.integer(f"attention.key_length{end}")
    if (v := h.integer(f"attention.value_length{end}", dim)) != dim:
        raise ModelError(f"keys of {dim} and values of {v} dimensions are not supported together")
    return AttentionShape(n_head, n_kv, dim, scale=1.0)


def _rope(file: GGUFFile, is_near: bool) -> RopeSpec:
    """Of blocks without a window a file divides most frequencies to nothing: these dimensions do not turn."""
    h = file.hparams
    if is_near:
        n_rot = h.integer(f"rope.dimension_count{NEAR}", h.integer(f"attention.key_length{NEAR}"))
        base = h.number(f"rope.freq_base{NEAR}", NEAR_BASE)
        return RopeSpec(n_rot, base, True, NOT_STRETCHED, divisors="")
    n_rot = h.integer("rope.dimension_count", h.integer("attention.key_length"))
    return RopeSpec(n_rot, h.number("rope.freq_base", 10_000.0), True, read_scaling(file), DIVISORS)
