"""`nemotron_h` and `nemotron_h_moe` (Nemotron-H, Nemotron 3): blocks of one part each, Mamba-2, attention or feed-forward.

There are no positions: rope keys in the file are not used, order comes from the Mamba layers. Metadata arrays give the kind of a
block: no key heads and no feed-forward is Mamba-2, key heads are attention, the rest is a feed-forward (experts if the file
has any, else relu^2). They include the MTP block, which stands last, is attention and feed-forward in one, and counts in
`block_count`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, Part, pair
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mamba2 import Mamba2
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.blocks.moe import Experts
from pyspec.models.experts import read_groups
from pyspec.models.model import ModelSpec
from pyspec.models.part import AttentionShape, PartSpec
from pyspec.models.read import attention_shape, read_decoder, trunk_layers
from pyspec.models.rope import NO_ROPE

NORM = "attn_norm"  # of every trunk block


def one_of(key: str, numbers: Sequence[int]) -> int:
    """The one number that all blocks which have any share; 0 if none has."""
    found = sorted(set(numbers) - {0})
    if len(found) > 1:
        raise ModelError(f"blocks that differ are not supported: {key} is {found[:8]}")
    return found[0] if found else 0


def read_attention(file: GGUFFile, kv_heads: Sequence[int]) -> AttentionShape:
    h = file.hparams
    n_head = one_of(h.key("attention.head_count"), h.each("attention.head_count", len(kv_heads)))
    # A model without attention has no key heads
    n_kv = one_of(h.key("attention.head_count_kv"), kv_heads) or n_head
    return attention_shape(file, n_head, n_kv)


def read_state(file: GGUFFile) -> Mamba2Shape:
    h = file.hparams
    inner, n_head = h.integer("ssm.inner_size"), h.integer("ssm.time_step_rank")
    n_group, n_state = h.integer("ssm.group_count"), h.integer("ssm.state_size")
    if inner % n_head or n_head % n_group:
        raise ModelError(
            f"state of {n_head} heads, {n_group} groups, size {n_state} does not give inner size {inner}"
        )
    return Mamba2Shape(n_head, inner // n_head, n_group, n_state, h.integer("ssm.conv_kernel"))


def read_experts(file: GGUFFile, widths: Sequence[int]) -> list[Experts | None]:
    """Of each block; blocks may differ (Puzzle). `widths`: their feed_forward_length."""
    h = file.hparams
    n_expert, n_block = h.integer("expert_count", 0), len(widths)
    if not n_expert:
        return [None] * n_block
    used = h.each("expert_used_count", n_block)
    if "expert_feed_forward_length" in h:
        inner = h.each("expert_feed_forward_length", n_block)
    else:
        inner = [width // max(n, 1) for width, n in zip(widths, used, strict=True)]
    shared, latent = h.integer("expert_shared_feed_forward_length", 0), h.integer("moe_latent_size", 0)
    renorm, scale = h.flag("expert_weights_norm", False), h.number("expert_weights_scale", 0.0) or 1.0

    def shape(n_used: int, n_ff: int) -> Experts:
        return Experts(
            n_expert=n_expert,
            n_used=n_used,
            n_ff=n_ff,
            n_ff_shared=shared,
            router="sigmoid",
            renorm=renorm,
            scale=scale,
            act="relu2",
            latent=latent,
            groups=read_groups(file),
        )

    return [
        shape(*of) if width else None
        for width, of in zip(widths, zip(used, inner, strict=True), strict=True)
    ]


def read(file: GGUFFile) -> ModelSpec:
    h = file.hparams
    n_layer, n_nextn = trunk_layers(file)
    n_block = n_layer + n_nextn
    kv_heads, widths = h.each("attention.head_count_kv", n_block), h.each("feed_forward_length", n_block)
    experts = read_experts(file, widths)
    n_ff = max(widths) if any(experts) else one_of(h.key("feed_forward_length"), widths)
    attention, mamba = Attention(read_attention(file, kv_heads), NO_ROPE), Mamba2(read_state(file))
    plain = Mlp(n_ff, "relu2")

    def part(i: int) -> PartSpec:
        if widths[i]:
            return experts[i] or plain
        return attention if kv_heads[i] else mamba

    # files of the MTP block alone say no width for it: then it is as the others
    mtp_experts = (experts[n_layer] if n_nextn else None) or next(filter(None, experts), None)
    return read_decoder(
        file,
        (BlockSpec((Part(NORM, part(i)),)) for i in range(n_layer)),
        n_ff,
        n_nextn=n_nextn,
        eps=h.number("attention.layer_norm_rms_epsilon", h.number("attention.layer_norm_epsilon", 1e-5)),
        mtp_block=pair(attention, mtp_experts or plain, "post_attention_norm"),
    )
