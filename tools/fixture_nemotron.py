"""Tiny random Nemotron-H models for the tests, beside those of fixture_models.py: one file holds Q8_0.

llama.cpp's MTP block ends in a LayerNorm, so the mtp_* and chain_* arrays are those of a LayerNorm.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf
import numpy as np
from fixture_models import VOCAB, Weights, add_general, add_tokenizer, matrix, norm, save

Q8_0, Q5_0 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q5_0


@dataclass(frozen=True)
class Tiny:
    """Shape of one tiny model. `pattern` names the blocks of the trunk as the original does: M, *, E, -."""

    name: str
    pattern: str
    experts: tuple[int, int] = (0, 0)  # in all, used by a token
    differ: tuple[tuple[int, int], ...] = ()  # of each block of experts: used by a token, width
    latent: int = 0
    mtp: bool = False
    fused_qkv: bool = False
    quantised: bool = False
    tied: bool = False
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 32
    hidden: int = 32
    mamba_heads: int = 4
    mamba_dim: int = 16
    groups: int = 2
    state: int = 16
    ffn: int = 32
    shared_ffn: int = 48

    @property
    def arch(self) -> str:
        return "nemotron_h_moe" if self.experts[0] else "nemotron_h"

    @property
    def blocks(self) -> str:
        return self.pattern + "+" * self.mtp

    def _of_blocks(self, same: int, which: int) -> list[int]:
        """A number for each block, 0 for those without a feed-forward."""
        own = iter(self.differ)
        return [(next(own)[which] if self.differ else same) if kind in "E-+" else 0 for kind in self.blocks]

    @property
    def widths(self) -> list[int]:
        return self._of_blocks(self.ffn, 1)

    @property
    def used(self) -> list[int]:
        return self._of_blocks(self.experts[1], 0)

    @property
    def inner(self) -> int:
        return self.mamba_heads * self.mamba_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state


MODELS = (
    Tiny("nemotron_dense", "M-*MM-M*", fused_qkv=True),
    Tiny("nemotron_moe", "MEM*EME", (8, 3), mtp=True),
    Tiny("nemotron_latent", "ME*EMM", (16, 5), latent=24, mtp=True, mamba_heads=8),
    Tiny("nemotron_differ", "MEM*EME", (8, 0), latent=24, differ=((3, 32), (1, 64), (5, 48))),
    Tiny(
        "nemotron_latent_q8_0",
        "MEM*E",
        (8, 3),
        latent=32,
        mtp=True,
        quantised=True,
        mamba_heads=2,
        mamba_dim=64,
        state=128,
        groups=1,
        shared_ffn=64,
    ),
)


def _attention(tiny: Tiny, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    n, width, kv_width = tiny.hidden, tiny.heads * tiny.head_dim, tiny.kv_heads * tiny.head_dim
    q, k, v = (matrix(rng, rows, n, gain) for rows, gain in ((width, 1.5), (kv_width, 1.5), (kv_width, 1.0)))
    if tiny.fused_qkv:
        yield "attn_qkv.weight", np.concatenate([q, k, v])
    else:
        yield from (("attn_q.weight", q), ("attn_k.weight", k), ("attn_v.weight", v))
    yield "attn_output.weight", matrix(rng, n, width, 2.0)


def _mamba(tiny: Tiny, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    n, heads = tiny.hidden, tiny.mamba_heads
    yield "ssm_in.weight", matrix(rng, tiny.inner + tiny.channels + heads, n, 1.5)
    yield "ssm_conv1d.weight", (0.5 * rng.standard_normal((tiny.channels, 4))).astype(np.float32)
    yield "ssm_conv1d.bias", (0.3 * rng.standard_normal(tiny.channels)).astype(np.float32)
    yield "ssm_dt.bias", np.log(np.expm1(rng.uniform(0.01, 0.3, heads))).astype(np.float32)
    yield "ssm_a", -rng.uniform(0.5, 4, (heads, 1)).astype(np.float32)
    yield "ssm_d", rng.standard_normal((heads, 1)).astype(np.float32)
    yield "ssm_norm.weight", norm(rng, tiny.inner).reshape(tiny.groups, -1)
    yield "ssm_out.weight", matrix(rng, n, tiny.inner)


def _feed(tiny: Tiny, rng: np.random.Generator, ffn: int) -> Iterator[tuple[str, np.ndarray]]:
    n, (experts, _) = tiny.hidden, tiny.experts
    if not experts:
        yield from (("ffn_up.weight", matrix(rng, ffn, n, 1.2)), ("ffn_down.weight", matrix(rng, n, ffn)))
        return
    wide = tiny.latent or n
    yield "ffn_gate_inp.weight", matrix(rng, experts, n, 2.0)
    yield "exp_probs_b.bias", (0.3 * rng.standard_normal(experts)).astype(np.float32)
    if tiny.latent:
        yield "ffn_latent_down.weight", matrix(rng, wide, n)
        yield "ffn_latent_up.weight", matrix(rng, n, wide)
    yield "ffn_up_exps.weight", np.stack([matrix(rng, ffn, wide, 1.2) for _ in range(experts)])
    yield "ffn_down_exps.weight", np.stack([matrix(rng, wide, ffn) for _ in range(experts)])
    yield "ffn_up_shexp.weight", matrix(rng, tiny.shared_ffn, n, 1.2)
    yield "ffn_down_shexp.weight", matrix(rng, n, tiny.shared_ffn)


def _block(tiny: Tiny, i: int, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    n, kind = tiny.hidden, tiny.blocks[i]
    yield "attn_norm.weight", norm(rng, n)
    if kind in "*+":
        yield from _attention(tiny, rng)
    if kind == "M":
        yield from _mamba(tiny, rng)
    if kind in "E-+":
        yield from _feed(tiny, rng, tiny.widths[i])
    if kind == "+":
        yield "post_attention_norm.weight", norm(rng, n)
        yield "nextn.eh_proj.weight", matrix(rng, n, 2 * n)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            yield f"nextn.{name}.weight", norm(rng, n)


def weights(tiny: Tiny) -> Weights:
    """GGUF tensor name -> float32 array; the seed is a checksum of the name."""
    rng = np.random.default_rng(zlib.crc32(tiny.name.encode()))
    found = {"token_embd.weight": matrix(rng, VOCAB, tiny.hidden, 2.0), "output_norm.weight": norm(rng, tiny.hidden)}
    found["output.weight"] = matrix(rng, VOCAB, tiny.hidden, 2.0)
    for i in range(len(tiny.blocks)):
        found.update({f"blk.{i}.{name}": value for name, value in _block(tiny, i, rng)})
    return found


def type_of(tiny: Tiny, name: str) -> gguf.GGMLQuantizationType | None:
    """As in real files: matrices are Q8_0 or, where K types did not fit, Q5_0; the rest is F32."""
    plain = not name.endswith(".weight") or "norm" in name or "conv1d" in name or "gate_inp" in name
    if not tiny.quantised or plain:
        return None
    return Q5_0 if "exps" in name else Q8_0


def _add_metadata(writer: gguf.GGUFWriter, tiny: Tiny) -> None:
    add_general(writer, tiny.name, tiny.quantised)
    writer.add_block_count(len(tiny.blocks))
    writer.add_context_length(1024)
    writer.add_vocab_size(VOCAB)
    writer.add_embedding_length(tiny.hidden)
    writer.add_head_count(tiny.heads)
    writer.add_head_count_kv([tiny.kv_heads if kind in "*+" else 0 for kind in tiny.blocks])
    writer.add_feed_forward_length(tiny.widths)
    writer.add_key_length(tiny.head_dim)
    writer.add_value_length(tiny.head_dim)
    writer.add_layer_norm_eps(1e-5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(tiny.inner)
    writer.add_ssm_state_size(tiny.state)
    writer.add_ssm_time_step_rank(tiny.mamba_heads)
    writer.add_ssm_group_count(tiny.groups)
    writer.add_rope_dimension_count(tiny.head_dim)  # there, and not to be used
    writer.add_rope_freq_base(10000.0)
    if tiny.experts[0]:
        writer.add_expert_count(tiny.experts[0])
        if tiny.differ:
            writer.add_array(f"{tiny.arch}.expert_used_count", tiny.used)
            writer.add_array(f"{tiny.arch}.expert_feed_forward_length", tiny.widths)
        else:
            writer.add_expert_used_count(tiny.experts[1])
            writer.add_expert_feed_forward_length(tiny.ffn)
        writer.add_expert_shared_feed_forward_length(tiny.shared_ffn)
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(2.5)
        writer.add_expert_group_count(1)
        writer.add_expert_group_used_count(1)
    if tiny.latent:
        writer.add_moe_latent_size(tiny.latent)
    if tiny.mtp:
        writer.add_nextn_predict_layers(1)


def write(path: Path, tiny: Tiny) -> None:
    """Write the model with its own types."""
    tensors = ((name, value, type_of(tiny, name)) for name, value in weights(tiny).items())
    save(path, tiny.arch, tensors, partial(_add_metadata, tiny=tiny), partial(add_tokenizer, pre="pixtral"))
