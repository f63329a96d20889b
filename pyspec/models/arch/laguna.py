"""`laguna`: blocks with windows have more heads, and a rope of their own; attention has gates by softplus; experts have a bias in their choice."""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.block import pair
from pyspec.models.blocks.attention import GATE, Attention
from pyspec.models.experts import feeds, read_routed
from pyspec.models.model import ModelSpec
from pyspec.models.read import (
    attention_shape,
    read_decoder,
    read_kv_heads,
    read_near_rope,
    read_rope,
    read_windows,
    trunk_layers,
)

PATTERN = 4  # the first of four sees all


def read(file: GGUFFile) -> ModelSpec:
    h, (n_layer, _) = file.hparams, trunk_layers(file)
    experts = read_routed(file, "sigmoid")
    heads = h.each("attention.head_count", n_layer), read_kv_heads(file, n_layer)
    windows = read_windows(file, n_layer, PATTERN, 0, first_is_whole=True)

    def attention(i: int, n_head: int, n_kv: int, window: int) -> Attention:
        shape = attention_shape(file, n_head, n_kv)
        rope = (read_near_rope if window else read_rope)(file, shape, neox=True)
        gates = file.tensors.get(f"blk.{i}.{GATE}")
        gate = ("softplus", 1 if gates is None or gates.shape[0] <= n_head else shape.head_dim)
        return Attention(shape, rope, window, qk_norm=True, gate=gate)

    mixers = map(attention, range(n_layer), *heads, windows)
    blocks = map(pair, mixers, feeds(file, n_layer, experts))
    return read_decoder(file, blocks, max(h.integer("feed_forward_length", 0), experts.n_inner))
