"""`falcon-h1`: attention and Mamba-2 side by side behind one norm, then a feed-forward. The model's factors are in its weights."""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.arch.nemotron import read_state
from pyspec.models.block import BlockSpec, Part, pair
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mamba2 import Mamba2
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.blocks.together import Together
from pyspec.models.model import ModelSpec
from pyspec.models.read import block_count, read_attention, read_decoder, read_rope


def read(file: GGUFFile) -> ModelSpec:
    shape, n_ff = read_attention(file), file.hparams.integer("feed_forward_length")
    attention, state = Attention(shape, read_rope(file, shape, neox=True)), read_state(file)

    def block(i: int) -> BlockSpec:
        if (bare := f"blk.{i}.ffn_norm") in file.tensors:  # converters leave the ending out
            file.split(bare, (f"{bare}.weight",))
        mamba = Mamba2(state, norms=f"blk.{i}.ssm_norm.weight" in file.tensors)
        return pair(Together(BlockSpec((Part("", attention), Part("", mamba)))), Mlp(n_ff))

    return read_decoder(file, map(block, range(block_count(file))), n_ff)
