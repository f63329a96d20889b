"""`olmo2` (OLMo 2 and 3), `exaone4`: no norms before parts, but behind them; q and k are normed.

OLMo norms all heads of q at once, and all of k. OLMo 3 has windows, whose rope is not stretched. EXAONE 4 norms each head; of its 64 blocks
(32B, and 33B of 4.5 before its MTP block) three of four have a window, and the others no rope, which no key says.
"""

from __future__ import annotations

from dataclasses import replace

from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.model import ModelSpec
from pyspec.models.read import read_attention, read_decoder, read_rope, read_windows, trunk_layers
from pyspec.models.rope import NO_ROPE, NOT_STRETCHED

PATTERN = 4  # where windows are, each fourth block sees all
EXAONE_32B, WINDOW = 64, 4096


def read(file: GGUFFile) -> ModelSpec:
    h, shape, (n_block, _) = file.hparams, read_attention(file), trunk_layers(file)
    is_olmo, n_ff = file.architecture == "olmo2", h.integer("feed_forward_length")
    rope = read_rope(file, shape, neox=True)
    near, far = (replace(rope, scaling=NOT_STRETCHED), rope) if is_olmo else (rope, NO_ROPE)
    windows = (0,) * n_block
    if is_olmo or n_block == EXAONE_32B:
        windows = read_windows(file, n_block, PATTERN, default=0 if is_olmo else WINDOW)

    def block(window: int) -> BlockSpec:
        own = near if window else far if any(windows) else rope
        attention = Attention(shape, own, window, qk_norm=not is_olmo, row_norm=is_olmo)
        return BlockSpec(
            (Part("", attention, "post_attention_norm"), Part("", Mlp(n_ff), "post_ffw_norm"))
        )

    return read_decoder(file, map(block, windows), n_ff)
