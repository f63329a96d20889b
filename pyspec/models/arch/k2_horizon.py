"""`k2-horizon`: norms of slices of the stream, heads with norms of their own, gates of attention by log2(1 + 2^x).

36B-A4B has experts, also of values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, NormKind, Part
from pyspec.models.blocks.attention import GATE, Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.blocks.value_experts import STACK, ValueExperts
from pyspec.models.experts import read_routed, read_router
from pyspec.models.model import ModelSpec
from pyspec.models.part import PartSpec
from pyspec.models.read import block_count, read_attention, read_decoder, read_rope
from pyspec.models.residual import Residual
from pyspec.ranges import Whole

OPTIONAL = ("attn_q_norm.weight", GATE, STACK)  # of a block


def read(file: GGUFFile) -> ModelSpec:
    h, shape, n_ff = file.hparams, read_attention(file), file.hparams.integer("feed_forward_length", 0)
    n_slice = h.integer("attention.group_norm_groups", 1, legal=Whole(0, 1 << 10)) or 1
    if h.integer("embedding_length") % n_slice:
        raise ModelError(f"{n_slice} slices do not divide a width of {h.integer('embedding_length')}")
    rope = read_rope(file, shape, neox=True, reads_ramp=True)
    rope = replace(rope, scaling=replace(rope.scaling, multiplier=0.0))  # which llama.cpp does not read
    kind, n_layer, experts = NormKind(n_slice=n_slice), block_count(file), None
    if h.integer("expert_count", 0):
        experts = read_routed(file, "sigmoid")

    def block(i: int) -> BlockSpec:
        has, feed = [f"blk.{i}.{x}" in file.tensors for x in OPTIONAL], cast(PartSpec, Mlp(n_ff))
        mixer = Attention(
            shape,
            rope,
            own_norms=has[0],
            gate=("softplus2", shape.head_dim) if has[1] else None,
            values=read_values(file) if has[2] else None,
        )
        if experts is not None and f"blk.{i}.ffn_gate_inp.weight" in file.tensors:
            feed = experts
        return BlockSpec((Part("attn_norm", mixer, kind=kind), Part("ffn_norm", feed, kind=kind)))

    n_inner = 0 if experts is None else experts.n_inner
    own = Residual(last=kind)
    return read_decoder(file, map(block, range(n_layer)), max(n_ff, n_inner), residual=own)


def read_values(file: GGUFFile) -> ValueExperts:
    """Experts of values, which are weighed as those of feed-forwards are."""
    h = file.hparams
    return ValueExperts(
        h.integer("attention.value_expert_count"),
        h.integer("attention.value_expert_used_count"),
        read_router(file, "sigmoid"),
        h.flag("expert_weights_norm", False),
        h.number("expert_weights_scale", 0.0) or 1.0,
    )
