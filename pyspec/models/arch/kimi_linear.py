"""`kimi-linear` and `bailingmoe3` (Ling 3): Kimi Delta Attention, latent attention in blocks with key heads, and experts with a bias in their
choice behind dense blocks.

Kimi Linear's attention has no rope, and its experts' weights always sum to one. Ling's has one sigmoid a head, and its log decays have a lower
bound.
"""

from __future__ import annotations

from dataclasses import replace

from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.gguf import GGUFFile
from pyspec.models.arch.deepseek2 import read_mla
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.kda import Kda
from pyspec.models.experts import feeds, read_experts, shared_width
from pyspec.models.model import ModelSpec
from pyspec.models.read import read_decoder, read_kv_heads, trunk_layers


def read(file: GGUFFile) -> ModelSpec:
    h, (n_layer, _) = file.hparams, trunk_layers(file)
    is_ling = file.architecture == "bailingmoe3"
    experts = read_experts(
        file,
        "sigmoid",
        n_ff_shared=shared_width(file),
        renorm=not is_ling or h.flag("expert_weights_norm", False),
    )
    delta = Kda(read_state(file, h.number("kda.gate_lower_bound") if is_ling else 0.0))
    mla = replace(read_mla(file, turns=is_ling), gates=int(is_ling))
    kv_heads, forwards = read_kv_heads(file, n_layer), feeds(file, n_layer, experts)
    blocks = tuple(
        BlockSpec((Part("attn_norm", mla if n_kv else delta), Part("ffn_norm", feed)))
        for n_kv, feed in zip(kv_heads, forwards, strict=True)
    )
    return read_decoder(file, blocks, max(h.integer("feed_forward_length", 0), experts.n_inner))


def read_state(file: GGUFFile, floor: float) -> GdnShape:
    """Heads of Kimi Delta Attention, whose keys are as many as their values. floor: of log decays"""
    h = file.hparams
    n_head, dim = h.integer("attention.head_count"), h.integer("kda.head_dim")
    n_channel, taps = 3 * n_head * dim, h.integer("ssm.conv_kernel")
    return GdnShape(n_head, n_head, dim, taps, n_channel, by_key=True, floor=floor)
