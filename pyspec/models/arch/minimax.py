"""`minimax-m2`: attention that turns half of a head, norms over all heads of q and of k at once, experts with a biased sigmoid router.

A file without `expert_gating_func` has the sigmoid, too.
"""

from __future__ import annotations

from dataclasses import replace

from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.moe import Experts
from pyspec.models.model import ModelSpec
from pyspec.models.read import block_count, read_attention, read_decoder, read_rope
from pyspec.models.read_experts import read_groups, read_router


def read(file: GGUFFile) -> ModelSpec:
    h, shape = file.hparams, read_attention(file)
    experts = Experts(
        n_expert=h.integer("expert_count"),
        n_used=h.integer("expert_used_count"),
        n_ff=h.integer("expert_feed_forward_length", h.integer("feed_forward_length", 0)),
        router=read_router(file, "sigmoid"),
        scale=h.number("expert_weights_scale", 0.0) or 1.0,
        biased=True,
        groups=read_groups(file),
    )
    attention = Attention(shape, read_rope(file, shape, neox=True), row_norm=True)
    block = BlockSpec((Part("attn_norm", attention), Part("ffn_norm", experts)))
    spec = read_decoder(file, (block,) * block_count(file), experts.n_inner)
    return replace(spec, ties_head=False)
