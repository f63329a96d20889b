"""`glm4moe` (GLM-4.5 to 4.7, Air): attention that turns half of a head, dense blocks first, then experts and shared ones; an MTP block.

`post_attention_norm` is the norm before the feed-forward. Shared experts are one, as wide as all of them. The MTP block counts in
`block_count`, is one of experts, and files without it count it, too.
"""

from __future__ import annotations

from dataclasses import replace

from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.attention import Attention
from pyspec.models.experts import feeds, read_experts, shared_width
from pyspec.models.model import ModelSpec
from pyspec.models.part import PartSpec
from pyspec.models.read import read_attention, read_decoder, read_rope, trunk_layers


def read(file: GGUFFile) -> ModelSpec:
    h, shape = file.hparams, read_attention(file)
    n_layer, n_nextn = trunk_layers(file)
    experts = read_experts(
        file,
        "sigmoid",
        n_ff_shared=shared_width(file),
        renorm=h.flag("expert_weights_norm", False),
        biased=True,
    )
    attention = Attention(shape, read_rope(file, shape, neox=True))

    def block(feed: PartSpec) -> BlockSpec:
        return BlockSpec((Part("attn_norm", attention), Part("post_attention_norm", feed)))

    blocks = tuple(block(feed) for feed in feeds(file, n_layer, experts))
    spec = read_decoder(file, blocks, max(h.integer("feed_forward_length"), experts.n_inner))
    return replace(spec, n_nextn=n_nextn, mtp_block=block(experts))
