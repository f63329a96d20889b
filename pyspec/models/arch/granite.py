"""`granite`, `granitemoe`, `granitehybrid` (Granite 3 and 4): llama's block with factors of embedding, scores, what a part adds, and logits.

Scores have `attention.scale`. A file whose rope was not trained (`rope.scaling.finetuned` false) has none. Blocks without key heads are
Mamba-2. Experts: softmax over all, the weights of the chosen divided by their sum, each as wide as `feed_forward_length`.
"""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.arch.nemotron import read_state
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mamba2 import Mamba2
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.model import ModelSpec
from pyspec.models.part import PartSpec
from pyspec.models.read import attention_shape, block_count, read_decoder, read_kv_heads, read_rope
from pyspec.models.rope import NO_ROPE


def read(file: GGUFFile) -> ModelSpec:
    h, n_block = file.hparams, block_count(file)
    added = h.number("residual_scale", 0.0) or 1.0
    is_hybrid = file.architecture == "granitehybrid"
    has_rope = file.architecture == "granitemoe" or h.flag("rope.scaling.finetuned", True)
    n_head = h.integer("attention.head_count")
    kv_heads = read_kv_heads(file, n_block)
    feed, n_ff = _feed(file)

    def mixer(n_kv: int) -> PartSpec:
        if not n_kv:
            return Mamba2(read_state(file))
        shape = attention_shape(file, n_head, n_kv)
        return Attention(shape, read_rope(file, shape, neox=False) if has_rope else NO_ROPE)

    blocks = {
        n_kv: BlockSpec(
            (Part("attn_norm", mixer(n_kv), factor=added), Part("ffn_norm", feed, factor=added))
        )
        for n_kv in set(kv_heads)
    }
    return read_decoder(
        file,
        (blocks[n_kv] for n_kv in kv_heads),
        n_ff,
        embed_factor=h.number("embedding_scale", 0.0) or 1.0,
        logit_factor=1.0 / (h.number("logit_scale", 1.0) if is_hybrid else h.number("logit_scale")),
    )


def _feed(file: GGUFFile) -> tuple[PartSpec, int]:
    """The feed-forward, and its inner values."""
    h = file.hparams
    n_ff = h.integer("feed_forward_length")
    if not h.integer("expert_count", 0):
        return Mlp(n_ff), n_ff
    from pyspec.models.experts import read_experts, shared_width

    experts = read_experts(file, n_ff=n_ff, n_ff_shared=shared_width(file))
    return experts, experts.n_inner
