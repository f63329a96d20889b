"""`smollm3`: llama's block, every fourth one without a rope."""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.block import pair
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.model import ModelSpec
from pyspec.models.read import block_count, read_attention, read_decoder, read_rope
from pyspec.models.rope import NO_ROPE

PERIOD = 4  # the last block of each has no rope; no key says so


def read(file: GGUFFile) -> ModelSpec:
    shape, n_ff = read_attention(file), file.hparams.integer("feed_forward_length")
    turned, plain = (
        pair(Attention(shape, rope), Mlp(n_ff)) for rope in (read_rope(file, shape, neox=False), NO_ROPE)
    )
    n = block_count(file)
    return read_decoder(file, (turned if (i + 1) % PERIOD else plain for i in range(n)), n_ff)
