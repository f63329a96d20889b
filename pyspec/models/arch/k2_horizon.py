"""`k2-horizon` of 0.9 to 7B: norms of slices of the stream, heads with norms of their own, gates of attention by log2(1 + 2^x).

Files with experts of values (36B-A4B) are refused.
"""

from __future__ import annotations

from dataclasses import replace

from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, NormKind, Part
from pyspec.models.blocks.attention import GATE, Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.model import ModelSpec
from pyspec.models.read import block_count, read_attention, read_decoder, read_rope
from pyspec.models.residual import Residual
from pyspec.ranges import Whole


def read(file: GGUFFile) -> ModelSpec:
    h, shape, n_ff = file.hparams, read_attention(file), file.hparams.integer("feed_forward_length")
    if h.integer("expert_count", 0):
        raise ModelError("k2-horizon files with experts of values are not supported")
    n_slice = h.integer("attention.group_norm_groups", 1, legal=Whole(0, 1 << 10)) or 1
    if h.integer("embedding_length") % n_slice:
        raise ModelError(f"{n_slice} slices do not divide a width of {h.integer('embedding_length')}")
    attention = Attention(
        shape,
        read_rope(file, shape, neox=True, reads_ramp=True),
        own_norms="blk.0.attn_q_norm.weight" in file.tensors,
        gate=("softplus2", shape.head_dim) if f"blk.0.{GATE}" in file.tensors else None,
    )
    kind = NormKind(n_slice=n_slice)
    block = BlockSpec((Part("attn_norm", attention, kind=kind), Part("ffn_norm", Mlp(n_ff), kind=kind)))
    spec = read_decoder(file, (block,) * block_count(file), n_ff)
    return replace(spec, residual=Residual(last=kind))
