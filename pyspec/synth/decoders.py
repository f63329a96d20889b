"""Decoders that differ from a plain one by what fields can say: norms, biases, windows, short convolutions, dense blocks before experts.

Gemma 3, Qwen2, Granite, Mistral 3, GLM 4 with experts, MiniMax-M2 and LFM2; `deepseek2` has latent attention in place of the plain one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from pyspec.gguf import ValueType
from pyspec.gguf.write import Value
from pyspec.synth.shapes import Dims
from pyspec.synth.trunks import F32, POINTED, U32, Key, Parts, Spec, attention, common, loud, nextn

POSTS = ("post_attention_norm", "post_ffw_norm")
ROUTED = {"softmax": 1, "sigmoid": 2}
TYPES = {bool: ValueType.BOOL, int: U32, float: F32, str: ValueType.STRING}


@dataclass(frozen=True, kw_only=True)
class DecoderDims(Dims):
    """Dimensions of these decoders.

    keys         the keys of metadata that no other field gives, without the architecture
    n_rot        dimensions of a head that turn; 0: all
    biased       queries, keys and values have biases
    posts        a norm behind each part, too
    window       of all blocks but each `interval`-th; 0: none
    n_expert     experts, `n_used` of width `n_ff_expert`, with `n_shared` shared ones, behind `n_dense` dense blocks; 0: none
    chosen_by    "softmax", or "sigmoid" with a bias of choices
    convolved    blocks whose mixer is a short convolution over `n_conv` rows
    """

    heads_normed: ClassVar[bool] = False
    rows_normed: ClassVar[bool] = False  # q as one row of all heads, and k
    posts: ClassVar[bool] = False
    ffn_norm: ClassVar[str] = "ffn_norm"
    last_norm: ClassVar[str] = "output_norm"
    keys: tuple[tuple[str, Value], ...] = ()
    n_rot: int = 0
    biased: bool = False
    window: int = 0
    interval: int = 6
    n_expert: int = 0
    n_used: int = 0
    n_ff_expert: int = 0
    n_shared: int = 0
    n_dense: int = 0
    chosen_by: str = "sigmoid"
    convolved: tuple[int, ...] = ()
    n_conv: int = 3
    louder: float = 1.0  # a factor on the head's usual size

    def has_experts(self, block: int) -> bool:
        return self.n_expert > 0 and block >= self.n_dense


@dataclass(frozen=True, kw_only=True)
class Gemma3(DecoderDims):
    arch: ClassVar[str] = "gemma3"
    heads_normed: ClassVar[bool] = True
    posts: ClassVar[bool] = True
    tied: bool = True


@dataclass(frozen=True, kw_only=True)
class Qwen2(DecoderDims):
    arch: ClassVar[str] = "qwen2"
    biased: bool = True


@dataclass(frozen=True, kw_only=True)
class Granite(DecoderDims):
    arch: ClassVar[str] = "granite"
    tied: bool = True


@dataclass(frozen=True, kw_only=True)
class Mistral3(DecoderDims):
    arch: ClassVar[str] = "mistral3"


@dataclass(frozen=True, kw_only=True)
class Glm4Moe(DecoderDims):
    arch: ClassVar[str] = "glm4moe"
    ffn_norm: ClassVar[str] = "post_attention_norm"
    biased: bool = True
    mtp: bool = True


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2(DecoderDims):
    arch: ClassVar[str] = "minimax-m2"
    rows_normed: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Lfm2(DecoderDims):
    arch: ClassVar[str] = "lfm2"
    heads_normed: ClassVar[bool] = True
    last_norm: ClassVar[str] = "token_embd_norm"
    tied: bool = True


@dataclass(frozen=True, kw_only=True)
class Lfm2Moe(Lfm2):
    arch: ClassVar[str] = "lfm2moe"


@dataclass(frozen=True, kw_only=True)
class Deepseek2(DecoderDims):
    """`head_dim` is that of a query: its last `n_rot` dimensions turn. A slot keeps `rank` + `n_rot` numbers for a token.

    q_rank   of queries; 0: they have one matrix
    n_value  dimensions of a head's value
    groups   of experts, and how many of them a row uses
    """

    arch: ClassVar[str] = "deepseek2"
    mtp: bool = True
    rank: int
    q_rank: int
    n_value: int
    groups: tuple[int, int] = (1, 1)


KINDS: dict[str, type[Dims]] = {
    kind.arch: kind
    for kind in (Gemma3, Qwen2, Granite, Mistral3, Glm4Moe, MiniMaxM2, Lfm2, Lfm2Moe, Deepseek2)
}


def metadata(dims: Dims, parts: Parts) -> Iterator[Key]:
    assert isinstance(dims, DecoderDims)
    a, n_block = dims.arch, dims.n_layer + parts.mtp
    own = _own_keys(dims, n_block) | dict(dims.keys)
    yield from (key for key in common(dims, n_block) if key[0].partition(".")[2] not in own)
    if parts.mtp:
        own["nextn_predict_layers"] = 1
    for name, value in own.items():
        kind = TYPES[type(value[0] if isinstance(value, list) else value)]
        yield f"{a}.{name}", value, kind


def _own_keys(dims: DecoderDims, n_block: int) -> dict[str, Value]:
    own: dict[str, Value] = {"rope.dimension_count": dims.n_rot or dims.head_dim}
    if dims.window:
        own["attention.sliding_window"] = dims.window
    if dims.convolved:
        kv = [0 if i in dims.convolved else dims.n_head_kv for i in range(n_block)]
        own |= {"shortconv.l_cache": dims.n_conv, "attention.head_count_kv": kv}
    if dims.n_expert:
        own |= {"expert_count": dims.n_expert, "expert_used_count": dims.n_used}
        own |= {"expert_feed_forward_length": dims.n_ff_expert}
        own |= {"leading_dense_block_count": dims.n_dense, "expert_shared_count": dims.n_shared}
        own |= {"expert_gating_func": ROUTED[dims.chosen_by], "expert_weights_norm": True}
    if isinstance(dims, Deepseek2):
        own |= {"attention.key_length": dims.rank + dims.n_rot, "attention.value_length": dims.rank}
        own |= {
            "attention.key_length_mla": dims.head_dim,
            "attention.value_length_mla": dims.n_value,
            "attention.kv_lora_rank": dims.rank,
            "attention.head_count_kv": 1,
        }
        own |= {"attention.q_lora_rank": dims.q_rank} if dims.q_rank else {}
        if dims.groups[0] > 1:
            own |= {"expert_group_count": dims.groups[0], "expert_group_used_count": dims.groups[1]}
    return own


def tensors(dims: Dims, parts: Parts) -> Iterator[Spec]:
    assert isinstance(dims, DecoderDims)
    n = dims.n_embd
    yield Spec("token_embd.weight", (dims.n_vocab, n), "embedding", dims.louder if dims.tied else 1.0)
    yield Spec(f"{dims.last_norm}.weight", (n,), "norm")
    if not dims.tied:
        yield Spec("output.weight", (dims.n_vocab, n), "head", dims.louder)
    for i in range(dims.n_layer if parts.trunk else 0):
        yield from _block(dims, i)
    if parts.mtp:
        yield from _block(dims, dims.n_layer)
        yield from nextn(dims, f"blk.{dims.n_layer}")


def _block(dims: DecoderDims, i: int) -> Iterator[Spec]:
    p, n = f"blk.{i}", dims.n_embd
    yield Spec(f"{p}.attn_norm.weight", (n,), "norm")
    if i in dims.convolved:
        yield Spec(f"{p}.shortconv.in_proj.weight", (3 * n, n), "matrix")
        yield Spec(f"{p}.shortconv.conv.weight", (n, dims.n_conv), "conv")
        yield Spec(f"{p}.shortconv.out_proj.weight", (n, n), "matrix", POINTED)
    elif isinstance(dims, Deepseek2):
        yield from _latent(dims, p)
    else:
        yield from attention(dims, p, qk_norm=dims.heads_normed)
        yield from _around_heads(dims, p)
    yield Spec(f"{p}.{dims.ffn_norm}.weight", (n,), "norm")
    yield from _experts(dims, p) if dims.has_experts(i) else _dense(p, n, dims.n_ff)
    if dims.posts:
        yield from (Spec(f"{p}.{name}.weight", (n,), "norm", loud(dims)) for name in POSTS)


def _around_heads(dims: DecoderDims, p: str) -> Iterator[Spec]:
    q, kv = dims.n_head * dims.head_dim, dims.n_head_kv * dims.head_dim
    if dims.biased:
        yield from (
            Spec(f"{p}.attn_{x}.bias", (m,), "bias") for x, m in (("q", q), ("k", kv), ("v", kv))
        )
    if dims.rows_normed:
        yield Spec(f"{p}.attn_q_norm.weight", (q,), "norm", POINTED)
        yield Spec(f"{p}.attn_k_norm.weight", (kv,), "norm", POINTED)


def _latent(dims: Deepseek2, p: str) -> Iterator[Spec]:
    """The matrices of heads are "gates", as files of small types keep them in a finer one."""
    n, h, plain = dims.n_embd, dims.n_head, dims.head_dim - dims.n_rot
    if dims.q_rank:
        yield Spec(f"{p}.attn_q_a.weight", (dims.q_rank, n), "matrix")
        yield Spec(f"{p}.attn_q_a_norm.weight", (dims.q_rank,), "norm")
    name = "attn_q_b" if dims.q_rank else "attn_q"
    yield Spec(f"{p}.{name}.weight", (h * dims.head_dim, dims.q_rank or n), "matrix", POINTED)
    yield Spec(f"{p}.attn_kv_a_mqa.weight", (dims.rank + dims.n_rot, n), "matrix", POINTED)
    yield Spec(f"{p}.attn_kv_a_norm.weight", (dims.rank,), "norm")
    yield Spec(f"{p}.attn_k_b.weight", (h, dims.rank, plain), "gate", POINTED)
    yield Spec(f"{p}.attn_v_b.weight", (h, dims.n_value, dims.rank), "gate")
    yield Spec(f"{p}.attn_output.weight", (n, h * dims.n_value), "matrix", POINTED)


def _dense(p: str, n: int, n_ff: int, kind: str = "") -> Iterator[Spec]:
    yield Spec(f"{p}.ffn_gate{kind}.weight", (n_ff, n), "matrix")
    yield Spec(f"{p}.ffn_up{kind}.weight", (n_ff, n), "matrix")
    yield Spec(f"{p}.ffn_down{kind}.weight", (n, n_ff), "matrix")


def _experts(dims: DecoderDims, p: str) -> Iterator[Spec]:
    n, e, f = dims.n_embd, dims.n_expert, dims.n_ff_expert
    yield Spec(f"{p}.ffn_gate_inp.weight", (e, n), "router", POINTED)
    if dims.chosen_by == "sigmoid":
        yield Spec(f"{p}.exp_probs_b.bias", (e,), "router")
    yield Spec(f"{p}.ffn_gate_exps.weight", (e, f, n), "matrix")
    yield Spec(f"{p}.ffn_up_exps.weight", (e, f, n), "matrix")
    yield Spec(f"{p}.ffn_down_exps.weight", (e, n, f), "matrix", POINTED)
    if dims.n_shared:
        yield from _dense(p, n, f * dims.n_shared, "_shexp")
