"""`mistral3` (Ministral 3): llama's block; YaRN whose ramp and length are the file's, and a temperature of queries. Some have experts.

Experts: softmax over all, the weights of the chosen divided by their sum, each as wide as `feed_forward_length`.
"""

from __future__ import annotations

from dataclasses import replace

from pyspec.gguf import GGUFFile
from pyspec.models.block import pair
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.blocks.moe import Experts
from pyspec.models.model import ModelSpec
from pyspec.models.read import block_count, read_attention, read_decoder, read_rope
from pyspec.models.rope import read_temperature


def read(file: GGUFFile) -> ModelSpec:
    h, shape = file.hparams, read_attention(file)
    rope = read_rope(file, shape, neox=False, reads_ramp=True)
    attention = Attention(shape, replace(rope, queries=read_temperature(file)))
    n_ff, n_expert = h.integer("feed_forward_length"), h.integer("expert_count", 0)
    feed: Mlp | Experts = Mlp(n_ff)
    if n_expert:
        scale = h.number("expert_weights_scale", 0.0) or 1.0
        feed = Experts(n_expert, h.integer("expert_used_count"), n_ff, scale=scale)
        n_ff = feed.n_inner
    return read_decoder(file, (pair(attention, feed),) * block_count(file), n_ff)
