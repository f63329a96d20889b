"""`hunyuan-dense`, `hunyuan-moe`: norms of heads behind the rope; dense feed-forwards, or experts beside a shared one, in all blocks."""

from __future__ import annotations

from dataclasses import replace

from pyspec.gguf import GGUFFile
from pyspec.models.block import pair
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.blocks.moe import Experts
from pyspec.models.experts import read_experts, shared_width
from pyspec.models.model import ModelSpec
from pyspec.models.read import block_count, read_attention, read_decoder, read_rope
from pyspec.ranges import Real


def read(file: GGUFFile) -> ModelSpec:
    h, shape = file.hparams, read_attention(file)
    rope, n_ff = read_rope(file, shape, neox=True), h.integer("feed_forward_length")
    feed: Mlp | Experts = Mlp(n_ff)
    if file.architecture == "hunyuan-moe":  # experts are as wide as the key of dense ones says
        feed = read_experts(file, n_ff=n_ff, n_ff_shared=shared_width(file))
        n_ff = feed.n_inner
    elif alpha := h.number("rope.scaling.alpha", 0.0, legal=Real(0, 1e9)):
        n = shape.head_dim
        rope = replace(rope, base=rope.base * alpha ** (n / max(1, n - 2)))
    attention = Attention(shape, rope, qk_norm=True, norm_behind=True)
    return read_decoder(file, (pair(attention, feed),) * block_count(file), n_ff)
