"""`glm5-next` (GLM-5.3-Flash): Kimi Delta Attention, and latent attention without a rope over pools of keys that an indexer chooses, between several
residual streams; dense blocks first, then experts; an MTP block.

The head reads the mean of the streams, and so does the MTP block, which has one stream and an indexer of its own. Activations are cut as
`deepseek4`'s are, those of dense blocks as those of shared experts.
"""

from __future__ import annotations

from dataclasses import replace

from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.arch.deepseek2 import read_mla
from pyspec.models.arch.deepseek4 import read_indexer, read_residual, stream_block
from pyspec.models.arch.kimi_linear import read_state
from pyspec.models.block import pair
from pyspec.models.blocks.indexer import EPS, PooledIndexer
from pyspec.models.blocks.kda import Kda
from pyspec.models.experts import cut, feeds, read_routed
from pyspec.models.model import ModelSpec
from pyspec.models.part import PartSpec
from pyspec.models.read import read_decoder, read_kv_heads, read_limits, trunk_layers
from pyspec.models.rope import NO_ROPE

KEY_EPS = 1e-6  # of norms of Kimi Delta Attention's queries and keys


def read(file: GGUFFile) -> ModelSpec:
    h, (n_layer, n_nextn) = file.hparams, trunk_layers(file)
    experts = read_routed(file, "sigmoid", biased=True)
    residual = replace(read_residual(file), means=True)
    floor = h.number("kda.gate_lower_bound", 0.0)
    delta = Kda(read_state(file, floor), turns_decays=floor != 0, eps=KEY_EPS)
    mla = replace(read_mla(file, turns=False), stretches=False)
    if mla.rope.n_rot:
        raise ModelError(
            f"{h.key('rope.dimension_count')} is {mla.rope.n_rot}; latent attention turns nothing here"
        )
    chooses = replace(mla, indexer=read_pools(file))
    mixers: dict[bool | None, PartSpec] = {None: delta, True: chooses, False: replace(mla, follows=True)}
    limits = read_limits(file, n_layer + n_nextn, one_for_both=True)
    given = zip(read_types(file, n_layer), feeds(file, n_layer, experts), limits, strict=False)
    blocks = (stream_block(mixers[kind], cut(feed, most), residual.n) for kind, feed, most in given)
    own = {"n_nextn": n_nextn, "mtp_block": pair(chooses, cut(experts, limits[-1]))}
    n_ff = max(h.integer("feed_forward_length", 0), experts.n_inner)
    return read_decoder(file, blocks, n_ff, residual=residual, ties_head=False, **own)


def read_pools(file: GGUFFile) -> PooledIndexer:
    """The indexer, which counts its choice in tokens of whole pools."""
    h, shape = file.hparams, read_indexer(file, 0)
    n = h.integer("attention.indexer.kpool")
    if shape.top_k < n or shape.top_k % n:
        raise ModelError(
            f"{h.key('attention.indexer.top_k')} is {shape.top_k}; want a multiple of {n} tokens (attention.indexer.kpool)"
        )
    if not h.flag("attention.indexer.kpool_select_tail", True):
        raise ModelError(
            f"{h.key('attention.indexer.kpool_select_tail')} is false: rows that do not see the tokens behind the last pool are not supported"
        )
    eps = h.number("attention.layer_norm_epsilon", EPS)
    return PooledIndexer(replace(shape, top_k=shape.top_k // n), NO_ROPE, n, eps)


def read_types(file: GGUFFile, n_layer: int) -> list[bool | None]:
    """Of each block whether its attention has an indexer; None: it has no attention."""
    h, key = file.hparams, "attention.indexer.types"
    types = h.each(key, n_layer) if key in h else [1] * n_layer
    kinds = [
        bool(x) if n_kv else None for n_kv, x in zip(read_kv_heads(file, n_layer), types, strict=False)
    ]
    if next((kind for kind in kinds if kind is not None), True) is False:
        raise ModelError(
            f"{h.key(key)}: the first block with attention has no indexer, and none before it has chosen"
        )
    return kinds
