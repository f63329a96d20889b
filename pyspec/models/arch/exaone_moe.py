"""`exaone-moe` (K-EXAONE): norms of heads; windows in three of four blocks, and no rope in the others; dense blocks first, then experts."""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.attention import Attention
from pyspec.models.experts import feeds, read_experts, shared_width
from pyspec.models.model import ModelSpec
from pyspec.models.read import read_attention, read_decoder, read_rope, read_windows, trunk_layers
from pyspec.models.rope import NO_ROPE

PATTERN = 4  # each fourth block sees all


def read(file: GGUFFile) -> ModelSpec:
    h, shape = file.hparams, read_attention(file)
    n_layer, _ = trunk_layers(file)
    experts = read_experts(
        file, "sigmoid", n_ff_shared=shared_width(file), renorm=h.flag("expert_weights_norm", False)
    )
    rope = read_rope(file, shape, neox=True)
    blocks = tuple(
        BlockSpec(
            (
                Part("attn_norm", Attention(shape, rope if window else NO_ROPE, window, qk_norm=True)),
                Part("ffn_norm", feed),
            )
        )
        for window, feed in zip(
            read_windows(file, n_layer, PATTERN), feeds(file, n_layer, experts), strict=True
        )
    )
    return read_decoder(file, blocks, max(h.integer("feed_forward_length", 0), experts.n_inner))
