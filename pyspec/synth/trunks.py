"""Metadata and tensors of models, by their dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pyspec.gguf import ValueType
from pyspec.gguf.write import Value
from pyspec.synth.shapes import (
    Deepseek4Dims,
    DFlashDims,
    Dims,
    GptOss,
    NemotronH,
    NemotronHMoe,
    Qwen3Moe,
    Qwen3Next,
    Qwen35,
    Qwen35Moe,
)

Kind = Literal[
    "matrix",
    "embedding",
    "head",
    "gate",
    "router",
    "norm",
    "conv",
    "decay",
    "step",
    "bias",
    "ids",
    "choice",
    "divisors",  # of frequencies: `gain` is the share of pairs that turn
]
Key = tuple[str, Value, ValueType]
POINTED, BIASED = 2.0, 5.0
HEAD_MIX = "output_hc"
U32, F32 = ValueType.UINT32, ValueType.FLOAT32


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor: its shape in torch order, the kind of its values (see `fill`), and a factor on their usual size.

    For "ids", whole numbers without repetition in a row, and "choice", whole numbers that rise, `gain` is their upper limit.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    gain: float = 1.0


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a model in the file."""

    trunk: bool = True
    mtp: bool = False


def file_arch(dims: Dims) -> str:
    """`general.architecture`."""
    return "dflash-draft" if isinstance(dims, DFlashDims) and dims.fork else dims.arch


def common(dims: Dims, n_block: int) -> Iterator[Key]:
    a = file_arch(dims)
    yield f"{a}.block_count", n_block, U32
    yield f"{a}.context_length", dims.n_ctx, U32
    yield f"{a}.embedding_length", dims.n_embd, U32
    if not isinstance(dims, Qwen35Moe):
        yield f"{a}.feed_forward_length", dims.n_ff, U32
    yield f"{a}.attention.head_count", dims.n_head, U32
    yield f"{a}.attention.head_count_kv", dims.n_head_kv, U32
    yield f"{a}.attention.key_length", dims.head_dim, U32
    yield f"{a}.attention.value_length", dims.head_dim, U32
    yield f"{a}.attention.layer_norm_rms_epsilon", dims.eps, F32
    yield f"{a}.rope.freq_base", dims.rope_base, F32
    yield f"{a}.vocab_size", dims.n_vocab, U32


def plain_metadata(dims: Dims, parts: Parts) -> Iterator[Key]:
    yield from common(dims, dims.n_layer)
    yield f"{dims.arch}.rope.dimension_count", dims.head_dim, U32


def moe_metadata(dims: Dims, parts: Parts) -> Iterator[Key]:
    assert isinstance(dims, Qwen3Moe | GptOss)
    a = dims.arch
    yield from common(dims, dims.n_layer)
    yield f"{a}.rope.dimension_count", dims.head_dim, U32
    yield f"{a}.expert_count", dims.n_expert, U32
    yield f"{a}.expert_used_count", dims.n_used, U32
    yield f"{a}.expert_feed_forward_length", dims.n_ff, U32
    if isinstance(dims, GptOss):
        yield f"{a}.attention.sliding_window", dims.window, U32
        yield f"{a}.rope.scaling.type", "yarn", ValueType.STRING
        yield f"{a}.rope.scaling.factor", dims.yarn[0], F32
        yield f"{a}.rope.scaling.original_context_length", dims.yarn[1], U32


def qwen35_metadata(dims: Dims, parts: Parts) -> Iterator[Key]:
    assert isinstance(dims, Qwen35)
    a = dims.arch
    yield from common(dims, dims.n_layer + parts.mtp)
    if parts.mtp:
        yield f"{a}.nextn_predict_layers", 1, U32
    yield f"{a}.full_attention_interval", dims.interval, U32
    yield f"{a}.rope.dimension_count", dims.n_rot, U32
    if not isinstance(dims, Qwen3Next):
        yield f"{a}.rope.dimension_sections", list(dims.sections), ValueType.INT32
    yield f"{a}.ssm.conv_kernel", dims.conv, U32
    yield f"{a}.ssm.state_size", dims.state, U32
    yield f"{a}.ssm.group_count", dims.n_k_head, U32
    yield f"{a}.ssm.time_step_rank", dims.n_v_head, U32
    yield f"{a}.ssm.inner_size", dims.inner, U32


def qwen35moe_metadata(dims: Dims, parts: Parts) -> Iterator[Key]:
    assert isinstance(dims, Qwen35Moe)
    yield from qwen35_metadata(dims, parts)
    yield f"{dims.arch}.expert_count", dims.n_expert, U32
    yield f"{dims.arch}.expert_used_count", dims.n_used, U32
    yield f"{dims.arch}.expert_feed_forward_length", dims.n_ff, U32
    yield f"{dims.arch}.expert_shared_feed_forward_length", dims.n_ff_shared, U32


def nemotron_metadata(dims: Dims, parts: Parts) -> Iterator[Key]:
    assert isinstance(dims, NemotronH)
    a, blocks = dims.arch, dims.pattern + "+" * parts.mtp
    per_block = (".feed_forward_length", ".head_count_kv")
    yield from (key for key in common(dims, len(blocks)) if not key[0].endswith(per_block))
    yield f"{a}.attention.head_count_kv", [dims.n_head_kv if b in "*+" else 0 for b in blocks], U32
    yield f"{a}.feed_forward_length", [dims.n_ff if b in "-E+" else 0 for b in blocks], U32
    yield f"{a}.attention.layer_norm_epsilon", dims.eps, F32
    yield f"{a}.rope.dimension_count", dims.head_dim, U32  # present but unused
    if parts.mtp:
        yield f"{a}.nextn_predict_layers", 1, U32
    yield f"{a}.ssm.conv_kernel", dims.conv, U32
    yield f"{a}.ssm.state_size", dims.state, U32
    yield f"{a}.ssm.group_count", dims.groups, U32
    yield f"{a}.ssm.time_step_rank", dims.mamba_heads, U32
    yield f"{a}.ssm.inner_size", dims.inner, U32
    if isinstance(dims, NemotronHMoe):
        yield f"{a}.expert_count", dims.n_expert, U32
        yield f"{a}.expert_used_count", dims.n_used, U32
        yield f"{a}.expert_feed_forward_length", dims.n_ff, U32
        yield f"{a}.expert_shared_feed_forward_length", dims.n_ff_shared, U32
        yield f"{a}.expert_shared_count", 1, U32
        yield f"{a}.expert_weights_norm", True, ValueType.BOOL
        yield f"{a}.expert_weights_scale", dims.routed_scale, F32
        if dims.latent:
            yield f"{a}.moe_latent_size", dims.latent, U32


def deepseek4_metadata(dims: Dims, parts: Parts) -> Iterator[Key]:
    assert isinstance(dims, Deepseek4Dims)
    a, n_block = dims.arch, dims.n_layer + parts.mtp
    other = ".feed_forward_length"
    yield from (key for key in common(dims, n_block) if not key[0].endswith(other))
    if parts.mtp:
        yield f"{a}.nextn_predict_layers", 1, U32
    whole = {
        "embedding_length_out": dims.n_stream * dims.n_embd,
        "attention.q_lora_rank": dims.q_rank,
        "attention.sliding_window": dims.window,
        "attention.output_group_count": dims.groups,
        "attention.output_lora_rank": dims.out_rank,
        "attention.indexer.head_count": dims.indexer[0],
        "attention.indexer.key_length": dims.indexer[1],
        "attention.indexer.top_k": dims.indexer[2],
        "rope.dimension_count": dims.n_rot,
        "rope.scaling.original_context_length": 65_536,
        "expert_count": dims.n_expert,
        "expert_used_count": dims.n_used,
        "expert_feed_forward_length": dims.n_ff,
        "expert_shared_count": 1,
        "expert_gating_func": 4,
        "hyper_connection.count": dims.n_stream,
        "hyper_connection.sinkhorn_iterations": 20,
        "hash_layer_count": dims.n_hash,
    }
    for name, number in whole.items():
        yield f"{a}.{name}", number, U32
    yield f"{a}.attention.compress_ratios", [*dims.ratios, 0], U32
    yield f"{a}.attention.compress_rope_freq_base", 160_000.0, F32
    yield f"{a}.rope.scaling.type", "yarn", ValueType.STRING
    yield f"{a}.rope.scaling.factor", 16.0, F32
    yield f"{a}.expert_weights_norm", True, ValueType.BOOL
    yield f"{a}.expert_weights_scale", dims.routed_scale, F32
    yield f"{a}.hyper_connection.epsilon", 1e-6, F32
    for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        yield f"{a}.{name}", [dims.limit] * n_block, F32


def _ends(dims: Dims) -> Iterator[Spec]:
    yield Spec("token_embd.weight", (dims.n_vocab, dims.n_embd), "embedding")
    yield Spec("output_norm.weight", (dims.n_embd,), "norm")
    if not dims.tied:
        yield Spec("output.weight", (dims.n_vocab, dims.n_embd), "head")


def attention(dims: Dims, p: str, *, gated: bool = False, qk_norm: bool = True) -> Iterator[Spec]:
    """Queries and keys of twice the usual size: with flat attention the text would depend on the last token alone, and loop."""
    width, kv = dims.n_head * dims.head_dim, dims.n_head_kv * dims.head_dim
    yield Spec(f"{p}.attn_q.weight", (width * (1 + gated), dims.n_embd), "matrix", POINTED)
    yield Spec(f"{p}.attn_k.weight", (kv, dims.n_embd), "matrix", POINTED)
    yield Spec(f"{p}.attn_v.weight", (kv, dims.n_embd), "matrix")
    yield Spec(f"{p}.attn_output.weight", (dims.n_embd, width), "matrix", POINTED)
    if qk_norm:
        yield Spec(f"{p}.attn_q_norm.weight", (dims.head_dim,), "norm", POINTED)
        yield Spec(f"{p}.attn_k_norm.weight", (dims.head_dim,), "norm", POINTED)


def _delta_net(dims: Qwen35, p: str) -> Iterator[Spec]:
    n = dims.n_embd
    yield Spec(f"{p}.attn_qkv.weight", (dims.n_channel, n), "matrix")
    yield Spec(f"{p}.attn_gate.weight", (dims.inner, n), "matrix")
    per_head = {"ba": 2} if isinstance(dims, Qwen3Next) else {"alpha": 1, "beta": 1}
    for name, k in per_head.items():
        yield Spec(f"{p}.ssm_{name}.weight", (k * dims.n_v_head, n), "gate")
    yield Spec(f"{p}.ssm_conv1d.weight", (dims.n_channel, dims.conv), "conv")
    yield Spec(f"{p}.ssm_a", (dims.n_v_head,), "decay")
    yield Spec(f"{p}.ssm_dt.bias", (dims.n_v_head,), "step")
    yield Spec(f"{p}.ssm_norm.weight", (dims.state,), "norm")
    yield Spec(f"{p}.ssm_out.weight", (n, dims.inner), "matrix")


def feed_forward(dims: Dims, p: str, norm: str) -> Iterator[Spec]:
    yield Spec(f"{p}.{norm}.weight", (dims.n_embd,), "norm")
    if isinstance(dims, Qwen35Moe | Qwen3Moe | GptOss):
        yield from _experts(dims, p)
        return
    yield Spec(f"{p}.ffn_gate.weight", (dims.n_ff, dims.n_embd), "matrix")
    yield Spec(f"{p}.ffn_up.weight", (dims.n_ff, dims.n_embd), "matrix")
    yield Spec(f"{p}.ffn_down.weight", (dims.n_embd, dims.n_ff), "matrix")


def _experts(dims: Qwen35Moe | Qwen3Moe | GptOss, p: str) -> Iterator[Spec]:
    """Down matrices larger than usual, because a row's expert weights sum to one and the experts' outputs partly cancel."""
    n, e, f = dims.n_embd, dims.n_expert, dims.n_ff
    yield Spec(f"{p}.ffn_gate_inp.weight", (e, n), "router", POINTED)
    yield Spec(f"{p}.ffn_gate_exps.weight", (e, f, n), "matrix")
    yield Spec(f"{p}.ffn_up_exps.weight", (e, f, n), "matrix")
    yield Spec(f"{p}.ffn_down_exps.weight", (e, n, f), "matrix", POINTED)
    if isinstance(dims, GptOss):
        shapes = {"gate_inp": (e,), "gate_exps": (e, f), "up_exps": (e, f), "down_exps": (e, n)}
        yield from (Spec(f"{p}.ffn_{x}.bias", shape, "bias", BIASED) for x, shape in shapes.items())
    if not isinstance(dims, Qwen35Moe):
        return
    shared = dims.n_ff_shared
    yield Spec(f"{p}.ffn_gate_inp_shexp.weight", (n,), "router")
    yield Spec(f"{p}.ffn_gate_shexp.weight", (shared, n), "matrix")
    yield Spec(f"{p}.ffn_up_shexp.weight", (shared, n), "matrix")
    yield Spec(f"{p}.ffn_down_shexp.weight", (n, shared), "matrix")


def plain_tensors(dims: Dims, parts: Parts) -> Iterator[Spec]:
    yield from _ends(dims)
    for p in (f"blk.{i}" for i in range(dims.n_layer)):
        yield Spec(f"{p}.attn_norm.weight", (dims.n_embd,), "norm")
        is_oss = isinstance(dims, GptOss)
        yield from attention(dims, p, qk_norm=dims.arch in ("qwen3", "qwen3moe"))
        yield from _attention_biases(dims, p) if is_oss else ()
        yield from feed_forward(dims, p, "post_attention_norm" if is_oss else "ffn_norm")


def _attention_biases(dims: Dims, p: str) -> Iterator[Spec]:
    """And the sinks."""
    kv = dims.n_head_kv * dims.head_dim
    widths = {"q": dims.n_head * dims.head_dim, "k": kv, "v": kv, "output": dims.n_embd}
    for name, n in widths.items():
        yield Spec(f"{p}.attn_{name}.bias", (n,), "bias", BIASED)
    yield Spec(f"{p}.attn_sinks.weight", (dims.n_head,), "bias", BIASED)


def _qwen35_block(dims: Qwen35, i: int) -> Iterator[Spec]:
    p = f"blk.{i}"
    yield Spec(f"{p}.attn_norm.weight", (dims.n_embd,), "norm")
    yield from _delta_net(dims, p) if dims.is_recurrent(i) else attention(dims, p, gated=True)
    yield from feed_forward(dims, p, "post_attention_norm")


def loud(dims: Dims) -> float:
    """Gain of norms behind parts where the embedding is scaled by sqrt(n_embd) and is the head, too: with less, a token repeats itself."""
    return max(1.0, (dims.n_embd / dims.n_layer) ** 0.5)


def nextn(dims: Dims, p: str) -> Iterator[Spec]:
    """An MTP block's tensors besides its layer."""
    n = dims.n_embd
    yield Spec(f"{p}.nextn.eh_proj.weight", (n, 2 * n), "matrix")
    for name in ("enorm", "hnorm", "shared_head_norm"):
        yield Spec(f"{p}.nextn.{name}.weight", (n,), "norm")


def qwen35_tensors(dims: Dims, parts: Parts) -> Iterator[Spec]:
    assert isinstance(dims, Qwen35)
    yield from _ends(dims)
    if parts.trunk:
        for i in range(dims.n_layer):
            yield from _qwen35_block(dims, i)
    if parts.mtp:
        p = f"blk.{dims.n_layer}"
        yield from _qwen35_block(dims, dims.n_layer)
        yield from nextn(dims, p)


def _mamba(dims: NemotronH, p: str) -> Iterator[Spec]:
    n, heads = dims.n_embd, dims.mamba_heads
    yield Spec(f"{p}.ssm_in.weight", (dims.inner + dims.n_channel + heads, n), "matrix")
    yield Spec(f"{p}.ssm_conv1d.weight", (dims.n_channel, dims.conv), "conv")
    yield Spec(f"{p}.ssm_conv1d.bias", (dims.n_channel,), "conv")
    yield Spec(f"{p}.ssm_dt.bias", (heads,), "step")
    yield Spec(f"{p}.ssm_a", (heads, 1), "decay")
    yield Spec(f"{p}.ssm_d", (heads, 1), "norm")
    yield Spec(f"{p}.ssm_norm.weight", (dims.groups, dims.inner // dims.groups), "norm")
    yield Spec(f"{p}.ssm_out.weight", (n, dims.inner), "matrix")


def _relu2(dims: NemotronH, p: str) -> Iterator[Spec]:
    n, f = dims.n_embd, dims.n_ff
    if not isinstance(dims, NemotronHMoe):
        yield Spec(f"{p}.ffn_up.weight", (f, n), "matrix")
        yield Spec(f"{p}.ffn_down.weight", (n, f), "matrix")
        return
    e, shared, wide = dims.n_expert, dims.n_ff_shared, dims.latent or n
    yield Spec(f"{p}.ffn_gate_inp.weight", (e, n), "router", POINTED)
    yield Spec(f"{p}.exp_probs_b.bias", (e,), "router")
    if dims.latent:  # "gate": files of 4-bit floats store it in a finer type
        yield Spec(f"{p}.ffn_latent_down.weight", (wide, n), "gate")
        yield Spec(f"{p}.ffn_latent_up.weight", (n, wide), "gate")
    yield Spec(f"{p}.ffn_up_exps.weight", (e, f, wide), "matrix")
    yield Spec(f"{p}.ffn_down_exps.weight", (e, wide, f), "matrix")
    yield Spec(f"{p}.ffn_up_shexp.weight", (shared, n), "matrix")
    yield Spec(f"{p}.ffn_down_shexp.weight", (n, shared), "matrix")


def nemotron_tensors(dims: Dims, parts: Parts) -> Iterator[Spec]:
    assert isinstance(dims, NemotronH)
    n, trunk = dims.n_embd, dims.pattern if parts.trunk else ""
    yield from _ends(dims)
    for p, kind in ((f"blk.{i}", kind) for i, kind in enumerate(trunk)):
        yield Spec(f"{p}.attn_norm.weight", (n,), "norm")
        parts_of = {"M": _mamba, "-": _relu2, "E": _relu2}
        yield from parts_of[kind](dims, p) if kind in parts_of else attention(dims, p, qk_norm=False)
    if parts.mtp:
        p = f"blk.{dims.n_layer}"
        yield Spec(f"{p}.attn_norm.weight", (n,), "norm")
        yield from attention(dims, p, qk_norm=False)
        yield Spec(f"{p}.post_attention_norm.weight", (n,), "norm")
        yield from _relu2(dims, p)
        yield from nextn(dims, p)


def mixers(dims: Deepseek4Dims, name: str, n_out: int, n_scale: int) -> Iterator[Spec]:
    yield Spec(f"{name}_fn.weight", (n_out, dims.n_stream * dims.n_embd), "router")
    yield Spec(f"{name}_base.weight", (n_out,), "router")
    yield Spec(f"{name}_scale.weight", (n_scale,), "norm")


def _compressor(dims: Deepseek4Dims, name: str, dim: int, ratio: int) -> Iterator[Spec]:
    width = dim * (2 if ratio == 4 else 1)
    yield Spec(f"{name}_kv.weight", (width, dims.n_embd), "matrix")
    yield Spec(f"{name}_gate.weight", (width, dims.n_embd), "matrix")
    yield Spec(f"{name}_ape.weight", (ratio, width), "router")
    yield Spec(f"{name}_norm.weight", (dim,), "norm")


def _deepseek4_attention(dims: Deepseek4Dims, p: str, ratio: int) -> Iterator[Spec]:
    n, inner, (heads, dim, _) = dims.n_embd, dims.n_head * dims.head_dim, dims.indexer
    yield Spec(f"{p}.attn_norm.weight", (n,), "norm")
    yield Spec(f"{p}.attn_sinks.weight", (dims.n_head,), "router")
    yield Spec(f"{p}.attn_q_a.weight", (dims.q_rank, n), "matrix")
    yield Spec(f"{p}.attn_q_a_norm.weight", (dims.q_rank,), "norm")
    yield Spec(f"{p}.attn_q_b.weight", (inner, dims.q_rank), "matrix", POINTED)
    yield Spec(f"{p}.attn_kv.weight", (dims.head_dim, n), "matrix", POINTED)
    yield Spec(f"{p}.attn_kv_a_norm.weight", (dims.head_dim,), "norm", POINTED)
    shape = (dims.groups * dims.out_rank, inner // dims.groups)
    yield Spec(f"{p}.attn_output_a.weight", shape, "matrix")
    yield Spec(f"{p}.attn_output_b.weight", (n, dims.groups * dims.out_rank), "matrix")
    if ratio:
        yield from _compressor(dims, f"{p}.attn_compressor", dims.head_dim, ratio)
    if ratio == 4:
        yield from _compressor(dims, f"{p}.indexer_compressor", dim, ratio)
        yield Spec(f"{p}.indexer.proj.weight", (heads, n), "gate")
        yield Spec(f"{p}.indexer.attn_q_b.weight", (heads * dim, dims.q_rank), "matrix")


def deepseek4_block(dims: Deepseek4Dims, i: int) -> Iterator[Spec]:
    p, n, e, f = f"blk.{i}", dims.n_embd, dims.n_expert, dims.n_ff
    yield from _deepseek4_attention(dims, p, dims.ratios[i] if i < dims.n_layer else 0)
    yield Spec(f"{p}.ffn_norm.weight", (n,), "norm")
    yield Spec(f"{p}.ffn_gate_inp.weight", (e, n), "router", POINTED)
    yield Spec(f"{p}.ffn_gate_exps.weight", (e, f, n), "matrix")
    yield Spec(f"{p}.ffn_up_exps.weight", (e, f, n), "matrix")
    yield Spec(f"{p}.ffn_down_exps.weight", (e, n, f), "matrix", POINTED)
    yield Spec(f"{p}.ffn_gate_shexp.weight", (f, n), "matrix")
    yield Spec(f"{p}.ffn_up_shexp.weight", (f, n), "matrix")
    yield Spec(f"{p}.ffn_down_shexp.weight", (n, f), "matrix")
    if i < dims.n_hash:
        yield Spec(f"{p}.ffn_gate_tid2eid.weight", (dims.n_vocab, dims.n_used), "ids", e)
    else:
        yield Spec(f"{p}.exp_probs_b.bias", (e,), "router")
    for name in ("hc_attn", "hc_ffn"):
        yield from mixers(dims, f"{p}.{name}", (2 + dims.n_stream) * dims.n_stream, 3)


def deepseek4_tensors(dims: Dims, parts: Parts) -> Iterator[Spec]:
    """The MTP block has a separate file, because its head's mixers have the same names as the trunk's."""
    assert isinstance(dims, Deepseek4Dims)
    yield from _ends(dims)
    yield from mixers(dims, HEAD_MIX, dims.n_stream, 1)
    if parts.trunk:
        for i in range(dims.n_layer):
            yield from deepseek4_block(dims, i)
    if parts.mtp:
        yield from deepseek4_block(dims, dims.n_layer)
        yield from nextn(dims, f"blk.{dims.n_layer}")
