"""`minimax-m2`: attention that turns half of a head, norms over all heads of q and of k at once, experts with a biased sigmoid router.

A file without `expert_gating_func` has the sigmoid, too.
"""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.block import pair
from pyspec.models.blocks.attention import Attention
from pyspec.models.experts import read_experts, read_router
from pyspec.models.model import ModelSpec
from pyspec.models.read import block_count, read_attention, read_decoder, read_rope


def read(file: GGUFFile) -> ModelSpec:
    shape = read_attention(file)
    experts = read_experts(file, read_router(file, "sigmoid"), biased=True)
    attention = Attention(shape, read_rope(file, shape, neox=True), row_norm=True)
    blocks = (pair(attention, experts),) * block_count(file)
    return read_decoder(file, blocks, experts.n_inner, ties_head=False)
