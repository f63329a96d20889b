"""`nemotron_h` and `nemotron_h_moe` (Nemotron-H, Nemotron 3): blocks of one part each, Mamba-2, attention or feed-forward.

There are no positions: rope keys in the file are not used, order comes from the Mamba layers. Metadata arrays say what a
block is: no key heads and no feed-forward is Mamba-2, key heads are attention, the rest is a feed-forward (experts if the file
has any, else relu^2). They include the MTP block, which stands last, is attention and feed-forward in one, and counts in
`block_count`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.decoder import DecoderConfig, Layer, vocab_size
from pyspec.models.layers import AttentionShape
from pyspec.models.moe import MoeShape

NORM = "attn_norm"  # the one norm of a trunk block, whatever it is


def per_block(file: GGUFFile, key: str, n_block: int) -> list[int]:
    """A number for each block; a single one counts for all."""
    value = file.metadata.get(key)
    if type(value) is int:
        return [value] * n_block
    numbers = [int(x) for x in file.get_numbers(key)]
    if len(numbers) < n_block:
        raise ModelError(f"{key} has {len(numbers)} entries for {n_block} blocks")
    return numbers[:n_block]


def one_of(key: str, numbers: Sequence[int]) -> int:
    """The one number that all blocks which have any share; 0 if none has."""
    found = sorted(set(numbers) - {0})
    if len(found) > 1:
        raise ModelError(f"blocks that differ are not supported: {key} is {found}")
    return found[0] if found else 0


def read_attention(file: GGUFFile, kv_heads: Sequence[int]) -> AttentionShape:
    a = file.architecture
    n_head = one_of(f"{a}.attention.head_count", per_block(file, f"{a}.attention.head_count", len(kv_heads)))
    n_kv = one_of(f"{a}.attention.head_count_kv", kv_heads) or n_head  # a model without attention has no key heads
    if n_head < 1 or n_head % n_kv:
        raise ModelError(
            f"{n_head} heads do not divide into {n_kv} key heads ({a}.attention.head_count, head_count_kv)"
        )
    dim = file.get_int(f"{a}.attention.key_length", file.get_int(f"{a}.embedding_length") // n_head)
    if (v := file.get_int(f"{a}.attention.value_length", dim)) != dim:
        raise ModelError(f"keys of {dim} and values of {v} dimensions are not supported together")
    return AttentionShape(n_head, n_kv, dim, scale=file.get_float(f"{a}.attention.scale", 0.0) or None)


def read_state(file: GGUFFile) -> Mamba2Shape:
    a = file.architecture
    inner, n_head = file.get_int(f"{a}.ssm.inner_size"), file.get_int(f"{a}.ssm.time_step_rank")
    n_group, n_state = file.get_int(f"{a}.ssm.group_count"), file.get_int(f"{a}.ssm.state_size")
    taps = file.get_int(f"{a}.ssm.conv_kernel")
    if min(inner, n_head, n_group, n_state, taps) < 1 or inner % n_head or n_head % n_group:
        raise ModelError(f"state of {n_head} heads, {n_group} groups, size {n_state} does not give inner size {inner}")
    return Mamba2Shape(n_head, inner // n_head, n_group, n_state, taps)


def read_experts(file: GGUFFile, widths: Sequence[int]) -> list[MoeShape | None]:
    """Of each block; blocks may differ (Puzzle). `widths`: their feed_forward_length."""
    a = file.architecture
    n_expert, n_block = file.get_int(f"{a}.expert_count", 0), len(widths)
    if not n_expert:
        return [None] * n_block
    if file.get_int(f"{a}.expert_group_count", 1) > 1:
        raise ModelError(f"experts in groups are not supported ({a}.expert_group_count)")
    used, key = per_block(file, f"{a}.expert_used_count", n_block), f"{a}.expert_feed_forward_length"
    if key in file.metadata:
        inner = per_block(file, key, n_block)
    else:
        inner = [width // max(n, 1) for width, n in zip(widths, used, strict=True)]

    def shape(n_used: int, n_ff: int) -> MoeShape:
        return MoeShape(
            n_expert=n_expert,
            n_used=n_used,
            n_ff=n_ff,
            n_ff_shared=file.get_int(f"{a}.expert_shared_feed_forward_length", 0),
            router="sigmoid",
            renorm=file.get_bool(f"{a}.expert_weights_norm", False),
            scale=file.get_float(f"{a}.expert_weights_scale", 0.0) or 1.0,
            act="relu2",
            latent=file.get_int(f"{a}.moe_latent_size", 0),
        )

    return [shape(*of) if width else None for width, of in zip(widths, zip(used, inner, strict=True), strict=True)]


def read(file: GGUFFile) -> DecoderConfig:
    a = file.architecture
    n_block, n_nextn = file.get_int(f"{a}.block_count"), file.get_int(f"{a}.nextn_predict_layers", 0)
    if not 0 <= n_nextn < n_block:
        raise ModelError(f"{n_nextn} MTP blocks among {n_block} blocks ({a}.nextn_predict_layers, block_count)")
    kv_heads = per_block(file, f"{a}.attention.head_count_kv", n_block)
    widths = per_block(file, f"{a}.feed_forward_length", n_block)
    experts, n_layer = read_experts(file, widths), n_block - n_nextn
    has_experts = any(experts)
    key = f"{a}.feed_forward_length"

    def layer(i: int) -> Layer:
        if widths[i]:
            return Layer("", "moe" if experts[i] else "relu2", NORM, experts[i])
        return Layer("attention" if kv_heads[i] else "mamba", "", NORM)

    # files of the MTP block alone say no width for it: then it is as the others
    mtp_experts = (experts[n_layer] if n_nextn else None) or next(filter(None, experts), None)

    return DecoderConfig(
        arch=a,
        n_vocab=vocab_size(file),
        n_embd=file.get_int(f"{a}.embedding_length"),
        n_layer=n_layer,
        n_nextn=n_nextn,
        n_ff=max(widths) if has_experts else one_of(key, widths),
        n_ctx_train=file.get_int(f"{a}.context_length"),
        eps=file.get_float(
            f"{a}.attention.layer_norm_rms_epsilon", file.get_float(f"{a}.attention.layer_norm_epsilon", 1e-5)
        ),
        attention=read_attention(file, kv_heads),
        n_rot=0,
        rope_base=1.0,
        rope_neox=False,
        layers=tuple(layer(i) for i in range(n_layer)),
        mtp_layer=Layer("attention", "moe" if has_experts else "relu2", "post_attention_norm", mtp_experts),
        state=read_state(file),
    )
