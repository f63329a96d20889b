"""`ernie4_5`, `ernie4_5-moe`: llama's block; dense blocks first, then experts with a bias in their choice, every so many blocks."""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.block import pair
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.experts import read_experts, shared_width
from pyspec.models.model import ModelSpec
from pyspec.models.read import block_count, read_attention, read_decoder, read_gqa, read_rope
from pyspec.ranges import Whole


def read(file: GGUFFile) -> ModelSpec:
    h = file.hparams
    if file.architecture == "ernie4_5":
        return read_gqa(file, neox=False)
    experts = read_experts(file, n_ff_shared=shared_width(file))
    dense, shape = Mlp(h.integer("feed_forward_length")), read_attention(file)
    attention = Attention(shape, read_rope(file, shape, neox=False))
    every = h.integer("interleave_moe_layer_step", 1, legal=Whole(1, 1 << 16))
    lead = h.integer("leading_dense_block_count", 0)
    blocks = (
        pair(attention, experts if i >= lead and (i + 1) % every == 0 else dense)
        for i in range(block_count(file))
    )
    return read_decoder(file, blocks, max(dense.n_ff, experts.n_inner))
