"""`deepseek2` (DeepSeek-V2, V3, R1, Kimi K2, GLM-4.7-Flash, Mistral Large 3): latent attention, dense blocks first, then experts in groups; an MTP
block. `mistral4` (Mistral Small 4): the same.

YaRN leaves cos and sin as they are, and multiplies scores; with another multiplier than one, cos and sin of `mistral4` have its length. Queries may
have a temperature. Files from before the heads' matrices were stored apart are refused.
"""

from __future__ import annotations

from dataclasses import replace

from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.block import pair
from pyspec.models.blocks.mla import Mla
from pyspec.models.blocks.moe import Experts
from pyspec.models.experts import feeds, read_routed
from pyspec.models.model import ModelSpec
from pyspec.models.read import read_decoder, trunk_layers, vocab_size
from pyspec.models.rope import RopeSpec, read_scaling, read_temperature
from pyspec.ranges import Whole

# Vocabulary and blocks of a model whose files may not say that its router is a sigmoid
GLM_FLASH = 154_880, (47, 48)
OWN = "deepseek2", "mistral4"


def read(file: GGUFFile) -> ModelSpec:
    h = file.hparams
    n_layer, n_nextn = trunk_layers(file)
    attention, experts = read_mla(file), _experts(file)
    blocks = (pair(attention, feed) for feed in feeds(file, n_layer, experts))
    n_ff = max(h.integer("feed_forward_length"), experts.n_inner)
    return read_decoder(file, blocks, n_ff, n_nextn=n_nextn, mtp_block=pair(attention, experts))


def read_mla(file: GGUFFile, *, turns: bool = True) -> Mla:
    """Latent attention of a file. turns: it has a rope"""
    h, arch = file.hparams, file.architecture
    if "attention.key_length_mla" not in h:
        raise ModelError(
            f"{arch} files without attention.key_length_mla are not supported; convert the model again"
        )
    queries = read_temperature(file)
    if queries is not None and arch not in OWN:
        raise ModelError(f"{arch} files with a temperature of queries are not supported")
    legal = None if turns else Whole(0, 1 << 20)
    n_rot = h.integer("rope.dimension_count", legal=legal)
    key = h.integer("attention.key_length_mla")
    if n_rot % 2 or not n_rot < key:
        raise ModelError(f"rope can not turn {n_rot} dimensions of heads of {key}")
    scaling = read_scaling(file, is_level=arch in OWN)
    scaling = replace(scaling, is_level=arch == "deepseek2")
    rope = RopeSpec(n_rot, h.number("rope.freq_base", 10000.0), False, scaling, queries=queries)
    has_q_rank = any(name.endswith(".attn_q_a.weight") for name in file.tensors)
    return Mla(
        n_head=h.integer("attention.head_count"),
        n_plain=key - n_rot,
        n_value=h.integer("attention.value_length_mla"),
        rank=h.integer("attention.kv_lora_rank"),
        q_rank=h.integer("attention.q_lora_rank", 0) if has_q_rank else 0,
        rope=rope if turns else RopeSpec(n_rot, 1.0, False, divisors="", turns=False),
        plain_scale=key**-0.5,
    )


def _experts(file: GGUFFile) -> Experts:
    h = file.hparams
    n_vocab, blocks = GLM_FLASH
    is_glm = vocab_size(file) == n_vocab and h.integer("block_count") in blocks
    return read_routed(file, "sigmoid" if is_glm else "softmax")
