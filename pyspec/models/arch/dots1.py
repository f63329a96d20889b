"""`dots1`, `bailingmoe2` (Ling 2): norms of heads, dense blocks first, then experts with a bias in their choice, and shared ones."""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.attention import Attention
from pyspec.models.experts import feeds, read_experts, shared_width
from pyspec.models.model import ModelSpec
from pyspec.models.read import read_attention, read_decoder, read_rope, trunk_layers


def read(file: GGUFFile) -> ModelSpec:
    h, shape = file.hparams, read_attention(file)
    experts = read_experts(
        file, n_ff_shared=shared_width(file), renorm=h.flag("expert_weights_norm", False)
    )
    attention = Attention(shape, read_rope(file, shape, neox=True), qk_norm=True)
    blocks = tuple(
        BlockSpec((Part("attn_norm", attention), Part("ffn_norm", feed)))
        for feed in feeds(file, trunk_layers(file)[0], experts)
    )
    return read_decoder(file, blocks, max(h.integer("feed_forward_length", 0), experts.n_inner))
