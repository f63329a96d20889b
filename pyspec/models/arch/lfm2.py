"""`lfm2` and `lfm2moe` (LFM2, LFM2.5): gated short convolutions, attention where a block has key heads; dense, or experts behind dense blocks.

The norm before the head is `token_embd_norm`. Experts: a sigmoid router with a bias, weights of the chosen divided by their sum.
"""

from __future__ import annotations

from pyspec.cuda.ops.short_conv.shape import ShortConvShape
from pyspec.gguf import GGUFFile
from pyspec.models.block import pair
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.blocks.moe import Experts
from pyspec.models.blocks.short_conv import ShortConv
from pyspec.models.experts import read_experts, read_router
from pyspec.models.model import ModelSpec
from pyspec.models.part import PartSpec
from pyspec.models.read import attention_shape, block_count, read_decoder, read_rope


def read(file: GGUFFile) -> ModelSpec:
    h, n_block = file.hparams, block_count(file)
    kv_heads = h.each("attention.head_count_kv", n_block)
    experts, dense = _experts(file), Mlp(h.integer("feed_forward_length"))
    n_dense = h.integer("leading_dense_block_count", 0) if experts else n_block

    def mixer(n_kv: int) -> PartSpec:
        if not n_kv:
            return ShortConv(
                ShortConvShape(h.integer("embedding_length"), h.integer("shortconv.l_cache"))
            )
        shape = attention_shape(file, h.integer("attention.head_count"), n_kv)
        window = h.integer("attention.sliding_window", 0)
        return Attention(shape, read_rope(file, shape, neox=True), window, qk_norm=True)

    def feed(i: int) -> PartSpec:
        return dense if experts is None or i < n_dense else experts

    blocks = (pair(mixer(n_kv), feed(i)) for i, n_kv in enumerate(kv_heads))
    n_ff = max(dense.n_ff, experts.n_inner if experts else 0)
    return read_decoder(file, blocks, n_ff, last_norm="token_embd_norm.weight")


def _experts(file: GGUFFile) -> Experts | None:
    h = file.hparams
    if not h.integer("expert_count", 0):
        return None
    return read_experts(file, read_router(file, "sigmoid"), biased=True)
