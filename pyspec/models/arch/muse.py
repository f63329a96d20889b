"""`muse-glimmer`: rows of the embedding are normed, norms stand before and behind every part, attention has gates for all its numbers.

Three of four blocks have a window and a rope, the others neither. The norms behind parts have an eps of their own.
"""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.model import ModelSpec
from pyspec.models.read import block_count, read_attention, read_decoder, read_near_rope, read_windows
from pyspec.models.residual import Residual
from pyspec.models.rope import NO_ROPE

PATTERN = 4
POST_EPS = 1e-8
CAP = 30.0  # of logits, where the file has no key


def read(file: GGUFFile) -> ModelSpec:
    h, shape, n_ff = file.hparams, read_attention(file), file.hparams.integer("feed_forward_length")
    near = read_near_rope(file, shape, neox=False)

    def block(window: int) -> BlockSpec:
        rope = near if window else NO_ROPE
        attention = Attention(shape, rope, window, qk_norm=True, gate=("sigmoid", shape.head_dim))
        return BlockSpec(
            (
                Part("attn_norm", attention, "post_attention_norm", post_eps=POST_EPS),
                Part("ffn_norm", Mlp(n_ff), "post_ffw_norm", post_eps=POST_EPS),
            )
        )

    windows = read_windows(file, block_count(file), PATTERN)
    return read_decoder(
        file,
        map(block, windows),
        n_ff,
        residual=Residual(norms_rows=True),
        logit_factor=h.number("logit_scale", 0.0) or 1.0,
        final_cap=h.number("final_logit_softcapping", CAP),
    )
