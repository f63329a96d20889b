"""`granite` (Granite 3 and 4, dense): llama's block with factors of embedding, scores, what a part adds, and logits.

Scores have `attention.scale`. A file whose rope was not trained (`rope.scaling.finetuned` false) has none.
"""

from __future__ import annotations

from dataclasses import replace

from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.model import ModelSpec
from pyspec.models.read import block_count, read_attention, read_decoder, read_rope
from pyspec.models.rope import NO_ROPE


def read(file: GGUFFile) -> ModelSpec:
    h, shape = file.hparams, read_attention(file)
    n_ff, added = h.integer("feed_forward_length"), h.number("residual_scale", 0.0) or 1.0
    rope = read_rope(file, shape, neox=False) if h.flag("rope.scaling.finetuned", True) else NO_ROPE
    block = BlockSpec(
        (
            Part("attn_norm", Attention(shape, rope), factor=added),
            Part("ffn_norm", Mlp(n_ff), factor=added),
        )
    )
    return replace(
        read_decoder(file, (block,) * block_count(file), n_ff),
        embed_factor=h.number("embedding_scale", 0.0) or 1.0,
        logit_factor=1.0 / h.number("logit_scale"),
    )
