"""`step35` (Step 3.5): blocks with windows have other heads and a rope of their own; one gate a head; activations are cut behind silu.

Blocks that see all turn half of the dimensions. Its MTP blocks are not read.
"""

from __future__ import annotations

from dataclasses import replace

from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.attention import GATE, Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.experts import read_experts, shared_width
from pyspec.models.model import ModelSpec
from pyspec.models.part import PartSpec
from pyspec.models.read import (
    attention_shape,
    read_decoder,
    read_kv_heads,
    read_limits,
    read_near_rope,
    read_rope,
    read_windows,
    trunk_layers,
)
from pyspec.models.rope import DIVISORS

PATTERN = 4
NEAR_BASE = 10000.0
FIRST_DIVISORS = "rope_freqs_first.weight"  # the first half of the file's


def read(file: GGUFFile) -> ModelSpec:
    h, (n_layer, _) = file.hparams, trunk_layers(file)
    n_ff = h.integer("feed_forward_length", 0)
    experts = read_experts(
        file, "sigmoid", n_ff_shared=shared_width(file), renorm=h.flag("expert_weights_norm", False)
    )
    if DIVISORS in file.tensors:
        file.split(DIVISORS, (FIRST_DIVISORS, "rope_freqs_rest.weight"))

    def attention(i: int, n_head: int, n_kv: int, window: int) -> Attention:
        shape, has = attention_shape(file, n_head, n_kv), (f"blk.{i}.{GATE}" in file.tensors)
        if window:
            rope = read_near_rope(file, shape, neox=True, base=NEAR_BASE)
        else:
            whole = read_rope(file, shape, neox=True)
            rope = replace(whole, n_rot=whole.n_rot // 2, divisors=FIRST_DIVISORS)
        return Attention(shape, rope, window, gate=("sigmoid", 1) if has else None)

    def feed(i: int, limits: tuple[float, float]) -> PartSpec:
        own, shared = (-limit for limit in limits)
        if f"blk.{i}.ffn_gate_inp.weight" not in file.tensors:
            return Mlp(n_ff, limit=shared)
        return replace(experts, limit=own, limit_shared=shared)

    heads = h.each("attention.head_count", n_layer), read_kv_heads(file, n_layer)
    windows, limits = read_windows(file, n_layer, PATTERN), read_limits(file, n_layer)
    blocks = tuple(
        BlockSpec((Part("attn_norm", attention(i, *each)), Part("ffn_norm", feed(i, limits[i]))))
        for i, each in enumerate(zip(*heads, windows, strict=True))
    )
    return read_decoder(file, blocks, max(n_ff, experts.n_inner))
