"""`qwen3`: GQA decoder with per-head norms on q and k and half-split rope."""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.decoder import DecoderConfig, Layer, read_attention, rope_factor, vocab_size


def read(file: GGUFFile) -> DecoderConfig:
    attention, n_layer = read_attention(file), file.get_int("qwen3.block_count")
    return DecoderConfig(
        arch="qwen3",
        n_vocab=vocab_size(file),
        n_embd=file.get_int("qwen3.embedding_length"),
        n_layer=n_layer,
        n_ff=file.get_int("qwen3.feed_forward_length"),
        n_ctx_train=file.get_int("qwen3.context_length"),
        eps=file.get_float("qwen3.attention.layer_norm_rms_epsilon"),
        attention=attention,
        n_rot=file.get_int("qwen3.rope.dimension_count", attention.head_dim),
        rope_base=file.get_float("qwen3.rope.freq_base", 10000.0),
        rope_factor=rope_factor(file),
        rope_neox=True,
        qk_norm=True,
        layers=(Layer(),) * n_layer,
    )
