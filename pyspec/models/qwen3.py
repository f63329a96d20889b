"""`qwen3`: GQA decoder with per-head norms on q and k and half-split rope."""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.decoder import DecoderConfig, Layer, block_count, read_attention, vocab_size
from pyspec.models.rope_scaling import read_scaling


def read(file: GGUFFile) -> DecoderConfig:
    h = file.hparams
    attention, n_layer = read_attention(file), block_count(file)
    return DecoderConfig(
        arch="qwen3",
        n_vocab=vocab_size(file),
        n_embd=h.integer("embedding_length"),
        n_layer=n_layer,
        n_ff=h.integer("feed_forward_length"),
        n_ctx_train=h.integer("context_length"),
        eps=h.number("attention.layer_norm_rms_epsilon"),
        attention=attention,
        n_rot=h.integer("rope.dimension_count", attention.head_dim),
        rope_base=h.number("rope.freq_base", 10000.0),
        rope_scaling=read_scaling(file),
        rope_neox=True,
        qk_norm=True,
        layers=(Layer(),) * n_layer,
    )
