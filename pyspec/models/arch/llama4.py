"""`llama4` (Scout, Maverick): three of four blocks see a chunk of the text, turned and then normed; the others all of it, without a rope.

Weights of experts multiply what those read. No key says which sizes norm heads: those of 128 experts do not.
"""

from __future__ import annotations

from dataclasses import replace

from pyspec.gguf import GGUFFile
from pyspec.models.block import pair
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.experts import read_experts
from pyspec.models.model import ModelSpec
from pyspec.models.read import block_count, read_attention, read_decoder, read_rope
from pyspec.models.rope import NO_ROPE, QueryTemperature
from pyspec.ranges import Whole

PERIOD, CHUNK, MAVERICK = 4, 8192, 128
FAR_ROPE = replace(NO_ROPE, queries=QueryTemperature(0.1, CHUNK, offset=1))


def read(file: GGUFFile) -> ModelSpec:
    h, shape = file.hparams, read_attention(file)
    n_inner = h.integer("expert_feed_forward_length")
    experts = read_experts(file, "sigmoid", n_ff_shared=n_inner, renorm=False, weighs_input=True)
    norms = experts.n_expert != MAVERICK
    rope = read_rope(file, shape, neox=False)
    near_rope = replace(rope, base=h.number("rope.freq_base_swa", rope.base))
    near = Attention(shape, near_rope, -CHUNK, norm_behind=norms)
    far = Attention(shape, FAR_ROPE)
    if h.integer("attention.sliding_window", CHUNK) == 0:  # the whole text and a rope in all blocks
        near = far = replace(near, window=0, rope=rope)
    dense = Mlp(h.integer("feed_forward_length"))
    every = h.integer("interleave_moe_layer_step", legal=Whole(1, 1 << 16))
    blocks = (
        pair(near if i % PERIOD else far, dense if i % every else experts)
        for i in range(1, block_count(file) + 1)
    )
    return read_decoder(file, blocks, max(dense.n_ff, experts.n_inner))
