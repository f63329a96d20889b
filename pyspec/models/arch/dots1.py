"""`dots1`, `bailingmoe2` (Ling 2): norms of heads, dense blocks first, then experts with a bias in their choice, and shared ones."""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.block import pair
from pyspec.models.blocks.attention import Attention
from pyspec.models.experts import feeds, read_routed
from pyspec.models.model import ModelSpec
from pyspec.models.read import read_attention, read_decoder, read_rope, trunk_layers


def read(file: GGUFFile) -> ModelSpec:
    shape, experts = read_attention(file), read_routed(file)
    attention = Attention(shape, read_rope(file, shape, neox=True), qk_norm=True)
    blocks = (pair(attention, feed) for feed in feeds(file, trunk_layers(file)[0], experts))
    n_ff = max(file.hparams.integer("feed_forward_length", 0), experts.n_inner)
    return read_decoder(file, blocks, n_ff)
