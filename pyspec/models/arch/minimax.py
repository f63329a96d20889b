"""`minimax-m2`: attention that turns half of a head, norms over all heads of q and of k at once, experts with a biased sigmoid router.

A file without `expert_gating_func` has the sigmoid, too.
"""

from __future__ import annotations

from dataclasses import replace

from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.attention import Attention
from pyspec.models.experts import read_experts
from pyspec.models.model import ModelSpec
from pyspec.models.read import block_count, read_attention, read_decoder, read_rope


def read(file: GGUFFile) -> ModelSpec:
    shape = read_attention(file)
    experts = read_experts(file, "sigmoid", biased=True)
    attention = Attention(shape, read_rope(file, shape, neox=True), row_norm=True)
    block = BlockSpec((Part("attn_norm", attention), Part("ffn_norm", experts)))
    spec = read_decoder(file, (block,) * block_count(file), experts.n_inner)
    return replace(spec, ties_head=False)
