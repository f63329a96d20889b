"""`llama`: GQA decoder with adjacent-pair rope, optional rope_freqs (Llama 3) and biases."""

from __future__ import annotations

from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.decoder import DecoderConfig, Layer, read_attention, rope_factor, vocab_size


def read(file: GGUFFile) -> DecoderConfig:
    if file.get_int("llama.expert_count", 0):
        raise ModelError("llama files with experts (Mixtral) are not supported")
    attention, n_layer = read_attention(file), file.get_int("llama.block_count")
    return DecoderConfig(
        arch="llama",
        n_vocab=vocab_size(file),
        n_embd=file.get_int("llama.embedding_length"),
        n_layer=n_layer,
        n_ff=file.get_int("llama.feed_forward_length"),
        n_ctx_train=file.get_int("llama.context_length"),
        eps=file.get_float("llama.attention.layer_norm_rms_epsilon"),
        attention=attention,
        n_rot=file.get_int("llama.rope.dimension_count", attention.head_dim),
        rope_base=file.get_float("llama.rope.freq_base", 10000.0),
        rope_factor=rope_factor(file),
        rope_neox=False,
        layers=(Layer(),) * n_layer,
    )
