"""`exaone-moe` (K-EXAONE): norms of heads; windows in three of four blocks, and no rope in the others; dense blocks first, then experts."""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.block import pair
from pyspec.models.blocks.attention import Attention
from pyspec.models.experts import feeds, read_routed
from pyspec.models.model import ModelSpec
from pyspec.models.read import read_attention, read_decoder, read_rope, read_windows, trunk_layers
from pyspec.models.rope import NO_ROPE

PATTERN = 4  # each fourth block sees all


def read(file: GGUFFile) -> ModelSpec:
    h, shape = file.hparams, read_attention(file)
    (n_layer, _), experts = trunk_layers(file), read_routed(file, "sigmoid")
    rope, windows = read_rope(file, shape, neox=True), read_windows(file, n_layer, PATTERN)
    blocks = (
        pair(Attention(shape, rope if window else NO_ROPE, window, qk_norm=True), feed)
        for window, feed in zip(windows, feeds(file, n_layer, experts), strict=True)
    )
    return read_decoder(file, blocks, max(h.integer("feed_forward_length", 0), experts.n_inner))
