"""Gemma 4: sizes, metadata and tensors. Blocks with a window have other heads than the blocks without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from pyspec.gguf import ValueType
from pyspec.synth.shapes import Dims
from pyspec.synth.trunks import F32, POINTED, U32, Key, Parts, Spec, loud

TURNED = 0.25  # share of the pairs of a head that turn, in blocks without a window


@dataclass(frozen=True, kw_only=True)
class Gemma4Dims(Dims):
    """n_head_kv and head_dim are those of blocks without a window, of which every `interval`-th is one.

    n_near_kv, near_dim  of blocks with a window
    shares_keys  values of blocks without a window are the keys' products
    n_shared     last blocks that read keys of earlier ones
    n_input      numbers of each block for each token, besides the stream
    n_expert     experts beside the dense feed-forward, `n_used` of width `n_ff_expert`; 0: none
    """

    arch: ClassVar[str] = "gemma4"
    tied: bool = True
    n_near_kv: int
    near_dim: int
    window: int
    interval: int = 6
    shares_keys: bool = True
    n_shared: int = 0
    n_input: int = 0
    n_expert: int = 0
    n_used: int = 0
    n_ff_expert: int = 0

    def has_window(self, block: int) -> bool:
        return (block + 1) % self.interval != 0

    def heads(self, block: int) -> tuple[int, int]:
        """Key heads and dimensions."""
        near = self.has_window(block)
        return (self.n_near_kv, self.near_dim) if near else (self.n_head_kv, self.head_dim)


def metadata(dims: Dims, parts: Parts) -> Iterator[Key]:
    assert isinstance(dims, Gemma4Dims)
    a, blocks = dims.arch, range(dims.n_layer)
    numbers = {
        "block_count": dims.n_layer,
        "context_length": dims.n_ctx,
        "embedding_length": dims.n_embd,
        "feed_forward_length": dims.n_ff,
        "embedding_length_per_layer_input": dims.n_input,
        "attention.head_count": dims.n_head,
        "attention.key_length": dims.head_dim,
        "attention.value_length": dims.head_dim,
        "attention.key_length_swa": dims.near_dim,
        "attention.value_length_swa": dims.near_dim,
        "attention.sliding_window": dims.window,
        "attention.shared_kv_layers": dims.n_shared,
        "rope.dimension_count": dims.head_dim,
        "rope.dimension_count_swa": dims.near_dim,
        "vocab_size": dims.n_vocab,
    }
    if dims.n_expert:
        numbers |= {"expert_count": dims.n_expert, "expert_used_count": dims.n_used}
        numbers["expert_feed_forward_length"] = dims.n_ff_expert
    yield from ((f"{a}.{name}", number, U32) for name, number in numbers.items())
    yield f"{a}.attention.head_count_kv", [dims.heads(i)[0] for i in blocks], U32
    pattern = [dims.has_window(i) for i in blocks]
    yield f"{a}.attention.sliding_window_pattern", pattern, ValueType.BOOL
    yield f"{a}.attention.layer_norm_rms_epsilon", dims.eps, F32
    yield f"{a}.rope.freq_base", dims.rope_base, F32
    yield f"{a}.rope.freq_base_swa", 1e4, F32
    yield f"{a}.final_logit_softcapping", 30.0, F32


def tensors(dims: Dims, parts: Parts) -> Iterator[Spec]:
    assert isinstance(dims, Gemma4Dims)
    n, width = dims.n_embd, dims.n_layer * dims.n_input
    yield Spec("token_embd.weight", (dims.n_vocab, n), "embedding")
    yield Spec("output_norm.weight", (n,), "norm")
    yield Spec("rope_freqs.weight", (dims.head_dim // 2,), "divisors", TURNED)
    if dims.n_input:
        yield Spec("per_layer_token_embd.weight", (dims.n_vocab, width), "embedding")
        yield Spec("per_layer_model_proj.weight", (width, n), "matrix")
        yield Spec("per_layer_proj_norm.weight", (dims.n_input,), "norm")
    for i in range(dims.n_layer):
        yield from _attention(dims, i)
        yield from _feed_forward(dims, f"blk.{i}")


def _attention(dims: Gemma4Dims, i: int) -> Iterator[Spec]:
    """Norms of heads so large that scores, which are not scaled, have the size that they have in other models."""
    p, n, (n_kv, dim) = f"blk.{i}", dims.n_embd, dims.heads(i)
    pointed = POINTED * dim**-0.25
    yield Spec(f"{p}.attn_norm.weight", (n,), "norm")
    yield Spec(f"{p}.attn_q.weight", (dims.n_head * dim, n), "matrix")
    yield Spec(f"{p}.attn_q_norm.weight", (dim,), "norm", pointed)
    yield Spec(f"{p}.attn_output.weight", (n, dims.n_head * dim), "matrix")
    yield Spec(f"{p}.post_attention_norm.weight", (n,), "norm", loud(dims))
    if i >= dims.n_layer - dims.n_shared:
        return
    yield Spec(f"{p}.attn_k.weight", (n_kv * dim, n), "matrix")
    yield Spec(f"{p}.attn_k_norm.weight", (dim,), "norm", pointed)
    if dims.has_window(i) or not dims.shares_keys:
        yield Spec(f"{p}.attn_v.weight", (n_kv * dim, n), "matrix")


def _feed_forward(dims: Gemma4Dims, p: str) -> Iterator[Spec]:
    n, f, e = dims.n_embd, dims.n_ff, dims.n_expert
    yield Spec(f"{p}.ffn_norm.weight", (n,), "norm")
    yield Spec(f"{p}.ffn_gate.weight", (f, n), "matrix")
    yield Spec(f"{p}.ffn_up.weight", (f, n), "matrix")
    yield Spec(f"{p}.ffn_down.weight", (n, f), "matrix")
    yield Spec(f"{p}.post_ffw_norm.weight", (n,), "norm", loud(dims))
    yield Spec(f"{p}.layer_output_scale.weight", (1,), "norm")
    if e:
        yield from (
            Spec(f"{p}.{name}.weight", (n,), "norm")
            for name in ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2")
        )
        yield Spec(f"{p}.ffn_gate_inp.weight", (e, n), "router", POINTED)
        yield Spec(f"{p}.ffn_gate_inp.scale", (n,), "norm", n**0.5)
        yield Spec(f"{p}.ffn_gate_up_exps.weight", (e, 2 * dims.n_ff_expert, n), "matrix")
        yield Spec(f"{p}.ffn_down_exps.weight", (e, n, dims.n_ff_expert), "matrix", POINTED)
        yield Spec(f"{p}.ffn_down_exps.scale", (e,), "norm")
    if dims.n_input:
        yield Spec(f"{p}.inp_gate.weight", (dims.n_input, n), "matrix")
        yield Spec(f"{p}.proj.weight", (n, dims.n_input), "matrix")
        yield Spec(f"{p}.post_norm.weight", (n,), "norm")
