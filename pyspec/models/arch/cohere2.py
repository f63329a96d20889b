"""`cohere2` (Command R7B, Command A): LayerNorms without a bias; attention and feed-forward read the same rows.

Three of four blocks have a window and a rope, the others neither. Logits are multiplied with a factor.
"""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.block import LAYER, BlockSpec, Part
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.blocks.together import Together
from pyspec.models.model import ModelSpec
from pyspec.models.read import block_count, read_attention, read_decoder, read_rope, read_windows
from pyspec.models.residual import Residual
from pyspec.models.rope import NO_ROPE

PATTERN = 4


def read(file: GGUFFile) -> ModelSpec:
    h, shape = file.hparams, read_attention(file)
    n_ff, rope = h.integer("feed_forward_length"), read_rope(file, shape, neox=False)

    def block(window: int) -> BlockSpec:
        attention = Attention(shape, rope if window else NO_ROPE, window)
        parts = BlockSpec((Part("", attention), Part("", Mlp(n_ff))))
        return BlockSpec((Part("attn_norm", Together(parts), kind=LAYER),))

    windows = read_windows(file, block_count(file), PATTERN)
    return read_decoder(
        file,
        map(block, windows),
        n_ff,
        eps=h.number("attention.layer_norm_epsilon"),
        residual=Residual(last=LAYER),
        logit_factor=h.number("logit_scale"),
    )
