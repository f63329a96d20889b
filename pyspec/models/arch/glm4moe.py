"""`glm4moe` (GLM-4.5 to 4.7, Air): attention that turns half of a head, dense blocks first, then experts and shared ones; an MTP block.

`post_attention_norm` is the norm before the feed-forward. Shared experts are one, as wide as all of them. The MTP block counts in
`block_count`, is one of experts, and files without it count it, too.
"""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.block import pair
from pyspec.models.blocks.attention import Attention
from pyspec.models.experts import feeds, read_routed
from pyspec.models.model import ModelSpec
from pyspec.models.read import read_attention, read_decoder, read_rope, trunk_layers

NORM = "post_attention_norm"


def read(file: GGUFFile) -> ModelSpec:
    h, shape = file.hparams, read_attention(file)
    n_layer, n_nextn = trunk_layers(file)
    experts = read_routed(file, "sigmoid", biased=True)
    attention = Attention(shape, read_rope(file, shape, neox=True))
    blocks = (pair(attention, feed, NORM) for feed in feeds(file, n_layer, experts))
    n_ff, last = max(h.integer("feed_forward_length"), experts.n_inner), pair(attention, experts, NORM)
    return read_decoder(file, blocks, n_ff, n_nextn=n_nextn, mtp_block=last)
