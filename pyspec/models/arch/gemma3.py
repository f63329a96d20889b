"""`gemma3`: five blocks with a window to one without, a rope for each kind, norms before and behind every part, gelu.

GGUF norm weights have the `+1` of the original already.
"""

from __future__ import annotations

from dataclasses import replace

from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.model import ModelSpec
from pyspec.models.read import block_count, read_attention, read_rope, read_windows, vocab_size
from pyspec.models.rope import NOT_STRETCHED

BLOCKS_27B = 62  # the one size that scales scores by its width over its heads; no key says so
PATTERN, NEAR_BASE = (
    6,
    10_000.0,
)  # where a file does not say: each sixth block sees all; base of the rope of windows


def read(file: GGUFFile) -> ModelSpec:
    h = file.hparams
    shape = read_attention(file)
    n_block = block_count(file)
    n_embd, n_ff = h.integer("embedding_length"), h.integer("feed_forward_length")
    if n_block == BLOCKS_27B:
        shape = replace(shape, scale=(n_embd / shape.n_head) ** -0.5)
    rope = read_rope(file, shape, neox=True)
    near = replace(rope, base=h.number("rope.freq_base_swa", NEAR_BASE), scaling=NOT_STRETCHED)

    def block(window: int) -> BlockSpec:
        attention = Attention(shape, near if window else rope, window, qk_norm=True)
        return BlockSpec(
            (
                Part("attn_norm", attention, post="post_attention_norm"),
                Part("ffn_norm", Mlp(n_ff, "gelu"), post="post_ffw_norm"),
            )
        )

    return ModelSpec(
        arch=file.architecture,
        n_vocab=vocab_size(file),
        n_embd=n_embd,
        n_ff=n_ff,
        n_ctx_train=h.integer("context_length"),
        eps=h.number("attention.layer_norm_rms_epsilon"),
        blocks=tuple(block(window) for window in read_windows(file, n_block, PATTERN)),
        embed_factor=n_embd**0.5,
        final_cap=h.number("final_logit_softcapping", 0.0),
    )
