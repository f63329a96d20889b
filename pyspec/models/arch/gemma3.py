"""`gemma3`: five blocks with a window to one without, a rope for each kind, norms before and behind every part, gelu.

GGUF norm weights have the `+1` of the original already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.model import ModelSpec
from pyspec.models.part import AttentionShape
from pyspec.models.read import block_count, read_attention, read_decoder, read_rope, read_windows
from pyspec.models.rope import NOT_STRETCHED

BLOCKS_27B = 62  # the one size that scales scores by its width over its heads; no key says so
# Where a file does not say: each sixth block sees all; base of windows' rope
PATTERN, NEAR_BASE = 6, 10_000.0


def read(file: GGUFFile) -> ModelSpec:
    h = file.hparams
    shape = read_scaled(file, BLOCKS_27B)
    rope = read_rope(file, shape, neox=True)
    near = replace(rope, base=h.number("rope.freq_base_swa", NEAR_BASE), scaling=NOT_STRETCHED)
    windows = read_windows(file, block_count(file), PATTERN, 0)
    mixers = [Attention(shape, near if n else rope, n, qk_norm=True) for n in windows]
    model = read_gemma(file, mixers, h.number("final_logit_softcapping", 0.0))
    return replace(model, sees_pictures="all")


def read_scaled(file: GGUFFile, n_block: int) -> AttentionShape:
    """Heads whose scores are scaled by width over heads in a model of `n_block` blocks."""
    shape = read_attention(file)
    if block_count(file) != n_block:
        return shape
    return replace(shape, scale=(file.hparams.integer("embedding_length") / shape.n_head) ** -0.5)


def read_gemma(file: GGUFFile, mixers: Sequence[Attention], final_cap: float) -> ModelSpec:
    """A model of blocks with these mixers."""
    n_ff = file.hparams.integer("feed_forward_length")
    feed = Part("ffn_norm", Mlp(n_ff, "gelu"), "post_ffw_norm")
    blocks = (BlockSpec((Part("attn_norm", x, "post_attention_norm"), feed)) for x in mixers)
    model = read_decoder(file, blocks, n_ff)
    return replace(model, embed_factor=model.n_embd**0.5, final_cap=final_cap)
