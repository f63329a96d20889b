"""`glm4` (GLM-4-0414, GLM-4.1V): a rope that turns a part of each head, norms before and behind every part, gates and ups in one matrix."""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.model import ModelSpec
from pyspec.models.read import (
    has_axes,
    read_attention,
    read_decoder,
    read_rope,
    split_gates,
    trunk_layers,
)


def read(file: GGUFFile) -> ModelSpec:
    shape, n_ff = read_attention(file), file.hparams.integer("feed_forward_length")
    n_layer, _ = trunk_layers(file)
    split_gates(file, n_layer, n_ff)
    rope = read_rope(file, shape, neox=has_axes(file))
    block = BlockSpec(
        (
            Part("attn_norm", Attention(shape, rope), "post_attention_norm"),
            Part("ffn_norm", Mlp(n_ff), "post_ffw_norm"),
        )
    )
    return read_decoder(file, (block,) * n_layer, n_ff)
