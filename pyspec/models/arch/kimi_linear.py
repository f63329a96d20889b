"""`kimi-linear` and `bailingmoe3` (Ling 3): Kimi Delta Attention, latent attention in blocks with key heads, and experts with a bias in their
choice behind dense blocks.

Kimi Linear's attention has no rope, and its experts' weights always sum to one. Ling's has one sigmoid a head, and its log decays have a lower
bound. Its MTP block is one of latent attention and experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.gguf import GGUFFile
from pyspec.models.arch.deepseek2 import read_mla
from pyspec.models.block import pair
from pyspec.models.blocks.kda import Kda
from pyspec.models.experts import cut_behind_silu, feeds, read_routed
from pyspec.models.model import ModelSpec
from pyspec.models.read import has_axes, read_decoder, read_kv_heads, read_limits, trunk_layers

MTP_NORM = "layer_output_norm.weight"


def read(file: GGUFFile) -> ModelSpec:
    h, (n_layer, n_nextn) = file.hparams, trunk_layers(file)
    is_ling = file.architecture == "bailingmoe3"
    experts = read_routed(file, "sigmoid", **{} if is_ling else {"renorm": True})
    delta = Kda(read_state(file, h.number("kda.gate_lower_bound") if is_ling else 0.0))
    mla = read_mla(file, turns=is_ling)
    rope = replace(mla.rope, neox=is_ling and has_axes(file))
    mla = replace(mla, rope=rope, gates=int(is_ling), stretches=not is_ling)
    kv_heads, forwards = read_kv_heads(file, n_layer + n_nextn), feeds(file, n_layer, experts)
    limits = read_limits(file, n_layer + n_nextn) if is_ling else [(0.0, 0.0)] * n_layer
    given = zip(kv_heads, forwards, limits, strict=False)
    blocks = (pair(mla if n_kv else delta, cut_behind_silu(feed, most)) for n_kv, feed, most in given)
    own: dict[str, Any] = {}
    if is_ling:
        last = pair(mla, cut_behind_silu(experts, limits[-1]))
        own = {"n_nextn": n_nextn, "mtp_block": last, "mtp_norm": MTP_NORM}
    n_ff = max(h.integer("feed_forward_length", 0), experts.n_inner)
    return read_decoder(file, blocks, n_ff, **own)


def read_state(file: GGUFFile, floor: float) -> GdnShape:
    """Heads of Kimi Delta Attention, whose keys are as many as their values. floor: of log decays"""
    h = file.hparams
    n_head, dim = h.integer("attention.head_count"), h.integer("kda.head_dim")
    n_channel, taps = 3 * n_head * dim, h.integer("ssm.conv_kernel")
    return GdnShape(n_head, n_head, dim, taps, n_channel, by_key=True, floor=floor)
