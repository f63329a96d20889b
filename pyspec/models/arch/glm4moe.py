"""`glm4moe` (GLM-4.5 to 4.7, Air): attention that turns half of a head, dense blocks first, then experts and shared ones; an MTP block.

`post_attention_norm` is the norm before the feed-forward. Shared experts are one, as wide as all of them. The MTP block counts in
`block_count`, is one of experts, and files without it count it, too.
"""

from __future__ import annotations

from dataclasses import replace

from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.blocks.moe import Experts
from pyspec.models.model import ModelSpec
from pyspec.models.part import PartSpec
from pyspec.models.read import read_attention, read_decoder, read_rope, trunk_layers
from pyspec.models.read_experts import read_groups, read_router


def read(file: GGUFFile) -> ModelSpec:
    h, shape = file.hparams, read_attention(file)
    n_layer, n_nextn = trunk_layers(file)
    width, n_dense = h.integer("expert_feed_forward_length"), h.integer("leading_dense_block_count", 0)
    experts = Experts(
        n_expert=h.integer("expert_count"),
        n_used=h.integer("expert_used_count"),
        n_ff=width,
        n_ff_shared=width * h.integer("expert_shared_count", 0),
        router=read_router(file, "sigmoid"),
        renorm=h.flag("expert_weights_norm", False),
        scale=h.number("expert_weights_scale", 0.0) or 1.0,
        biased=True,
        groups=read_groups(file),
    )
    dense = Mlp(h.integer("feed_forward_length"))
    attention = Attention(shape, read_rope(file, shape, neox=True))

    def block(feed: PartSpec) -> BlockSpec:
        return BlockSpec((Part("attn_norm", attention), Part("post_attention_norm", feed)))

    blocks = tuple(block(dense if i < n_dense else experts) for i in range(n_layer))
    spec = read_decoder(file, blocks, max(dense.n_ff, experts.n_inner))
    return replace(spec, n_nextn=n_nextn, mtp_block=block(experts))
