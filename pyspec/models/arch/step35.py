"""`step35` (Step 3.5): blocks with windows have other heads and a rope of their own; one gate a head; activations are cut behind silu.

Blocks that see all turn half of the dimensions. Each of its MTP blocks drafts one token more.
"""

from __future__ import annotations

from dataclasses import replace

from pyspec.gguf import GGUFFile
from pyspec.models.block import pair
from pyspec.models.blocks.attention import GATE, Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.experts import cut_behind_silu, read_routed
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
from pyspec.models.residual import Residual
from pyspec.models.rope import DIVISORS

PATTERN = 4
NEAR_BASE = 10000.0
FIRST_DIVISORS = "rope_freqs_first.weight"  # as many as half of a head has


def read(file: GGUFFile) -> ModelSpec:
    h, (n_layer, n_nextn) = file.hparams, trunk_layers(file)
    n_block = n_layer + n_nextn
    n_ff = h.integer("feed_forward_length", 0)
    experts = read_routed(file, "sigmoid")
    heads = h.each("attention.head_count", n_block), read_kv_heads(file, n_block)
    if DIVISORS in file.tensors:
        n_rot = read_rope(file, attention_shape(file, heads[0][0], heads[1][0]), neox=True).n_rot
        file.split(DIVISORS, (FIRST_DIVISORS, "rope_freqs_rest.weight"), n_rot // 4)

    def attention(i: int, n_head: int, n_kv: int, window: int) -> Attention:
        shape = attention_shape(file, n_head, n_kv)
        # An MTP block with a file of its own is like the trunk's last one
        of = i if f"blk.{i}.attn_norm.weight" in file.tensors else n_layer - 1
        has = f"blk.{of}.{GATE}" in file.tensors
        if window:
            rope = read_near_rope(file, shape, neox=True, base=NEAR_BASE)
        else:
            whole = read_rope(file, shape, neox=True)
            rope = replace(whole, n_rot=whole.n_rot // 2, divisors=FIRST_DIVISORS)
        return Attention(shape, rope, window, gate=("sigmoid", 1) if has else None)

    def feed(i: int, limits: tuple[float, float]) -> PartSpec:
        is_dense = f"blk.{i}.ffn_gate_inp.weight" not in file.tensors  # MTP blocks of Step 3.5 are
        return cut_behind_silu(Mlp(n_ff) if is_dense else experts, limits)

    windows, limits = read_windows(file, n_block, PATTERN), read_limits(file, n_block)
    each = range(n_block)
    blocks = tuple(map(pair, map(attention, each, *heads, windows), map(feed, each, limits)))
    return read_decoder(
        file,
        blocks[:n_layer],
        max(n_ff, experts.n_inner),
        n_nextn=n_nextn,
        mtp_block=blocks[n_layer] if n_nextn else None,
        mtp_more=blocks[n_layer + 1 :],
        residual=Residual(seeds_raw=True),
    )
