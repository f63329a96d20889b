"""Tiny random DeepSeek-V4 models for the tests: the trunk and, in a file of its own, the MTP block.

    python tools/fixture_deepseek4.py FOLDER

Weights come from a generator seeded by the model's name. Their sizes are the smallest that are honest: windows slide and rings wrap within the tokens,
both kinds of compressed rows occur, more of them than the indexer takes, activations are cut, a table names the experts of the first layer.
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf
import numpy as np
from fixture_models import VOCAB, add_tokenizer, save

STREAMS, SINKHORN, FLOOR, EPS = 4, 20, 1e-6, 1e-6
N_INDEX_HEAD, INDEX_DIM = 32, 32  # fewer heads give scores of zero, and ties
EMBEDDING_SCALE = 8.0


@dataclass(frozen=True)
class TinyStreams:
    """Shape of one model. `ratios`: of the trunk's layers."""

    name: str
    ratios: tuple[int, ...]
    hidden: int = 32
    heads: int = 4
    head_dim: int = 32
    n_rot: int = 16
    q_rank: int = 32
    groups: int = 2
    out_rank: int = 32
    window: int = 12
    top_k: int = 6
    experts: tuple[int, int] = (6, 2)
    ffn: int = 32
    n_hash: int = 1
    limit: float = 1.0
    scale: float = 1.5

    @property
    def layers(self) -> int:
        return len(self.ratios)


SHAPES = (
    TinyStreams("deepseek4", (0, 4, 128, 4)),
    TinyStreams(
        "deepseek4_pro",
        (128, 4, 4),
        hidden=64,
        heads=8,
        groups=4,
        window=16,
        top_k=512,
        experts=(4, 3),
        n_hash=0,
        scale=2.5,
    ),
)
Tensors = dict[str, np.ndarray]


class Maker:
    """Draws the tensors of one model in order."""

    def __init__(self, shape: TinyStreams, of: str) -> None:
        self.s, self.rng = shape, np.random.default_rng(zlib.crc32(f"{shape.name} {of}".encode()))

    def matrix(self, *dims: int) -> np.ndarray:
        return (self.rng.standard_normal(dims) / dims[-1] ** 0.5).astype(np.float32)

    def norm(self, n: int) -> np.ndarray:
        return (1 + 0.2 * self.rng.standard_normal(n)).astype(np.float32)

    def vector(self, *dims: int, around: float = 0.0) -> np.ndarray:
        return (around + 0.5 * self.rng.standard_normal(dims)).astype(np.float32)

    def mix(self, name: str, n_out: int, n_scale: int) -> Tensors:
        return {
            f"{name}_fn": self.matrix(n_out, STREAMS * self.s.hidden),
            f"{name}_base": self.vector(n_out),
            f"{name}_scale": self.vector(n_scale, around=1.0),
        }

    def compressor(self, name: str, dim: int, ratio: int) -> Tensors:
        width = dim * (2 if ratio == 4 else 1)
        return {
            f"{name}_kv": self.matrix(width, self.s.hidden),
            f"{name}_gate": self.matrix(width, self.s.hidden),
            f"{name}_ape": self.vector(ratio, width),
            f"{name}_norm": self.norm(dim),
        }

    def attention(self, ratio: int) -> Tensors:
        s = self.s
        inner = s.heads * s.head_dim
        tensors = {
            "attn_norm": self.norm(s.hidden),
            "attn_sinks": self.vector(s.heads),
            "attn_q_a": self.matrix(s.q_rank, s.hidden),
            "attn_q_a_norm": self.norm(s.q_rank),
            "attn_q_b": self.matrix(inner, s.q_rank),
            "attn_kv": self.matrix(s.head_dim, s.hidden),
            "attn_kv_a_norm": self.norm(s.head_dim),
            "attn_output_a": self.matrix(s.groups * s.out_rank, inner // s.groups),
            "attn_output_b": self.matrix(s.hidden, s.groups * s.out_rank),
        }
        if ratio:
            tensors |= self.compressor("attn_compressor", s.head_dim, ratio)
        if ratio == 4:
            tensors |= self.compressor("indexer_compressor", INDEX_DIM, 4)
            tensors["indexer.proj"] = self.matrix(N_INDEX_HEAD, s.hidden)
            tensors["indexer.attn_q_b"] = self.matrix(N_INDEX_HEAD * INDEX_DIM, s.q_rank)
        return tensors

    def feed(self, *, is_hashed: bool) -> Tensors:
        s, (n, used) = self.s, self.s.experts
        tensors = {
            "ffn_norm": self.norm(s.hidden),
            "ffn_gate_inp": self.matrix(n, s.hidden),
            "ffn_gate_exps": self.matrix(n, s.ffn, s.hidden),
            "ffn_up_exps": self.matrix(n, s.ffn, s.hidden),
            "ffn_down_exps": self.matrix(n, s.hidden, s.ffn),
            "ffn_gate_shexp": self.matrix(s.ffn, s.hidden),
            "ffn_up_shexp": self.matrix(s.ffn, s.hidden),
            "ffn_down_shexp": self.matrix(s.hidden, s.ffn),
        }
        if is_hashed:
            table = [self.rng.permutation(n)[:used] for _ in range(VOCAB)]
            tensors["ffn_gate_tid2eid"] = np.array(table, dtype=np.int32)
        else:
            tensors["exp_probs_b.bias"] = self.vector(n)
        return tensors

    def block(self, i: int, ratio: int, *, is_hashed: bool) -> Tensors:
        parts = {
            **self.attention(ratio),
            **self.feed(is_hashed=is_hashed),
            **self.mix("hc_attn", (2 + STREAMS) * STREAMS, 3),
            **self.mix("hc_ffn", (2 + STREAMS) * STREAMS, 3),
        }
        return {f"blk.{i}.{name}": value for name, value in parts.items()}

    def ends(self) -> Tensors:
        s = self.s
        return {
            "token_embd": EMBEDDING_SCALE * self.matrix(VOCAB, s.hidden),
            "output": self.matrix(VOCAB, s.hidden),
            "output_norm": self.norm(s.hidden),
        }


def trunk(shape: TinyStreams) -> Tensors:
    """All tensors of the target, without the suffix `.weight`."""
    maker = Maker(shape, "trunk")
    tensors = maker.ends() | maker.mix("output_hc", STREAMS, 1)
    for i, ratio in enumerate(shape.ratios):
        tensors |= maker.block(i, ratio, is_hashed=i < shape.n_hash)
    return tensors


def mtp(shape: TinyStreams) -> Tensors:
    """All tensors of the MTP block's file, with the trunk's embedding and head once more."""
    maker, n, p = Maker(shape, "mtp"), shape.hidden, f"blk.{shape.layers}.nextn"
    tensors = Maker(shape, "trunk").ends() | maker.mix("output_hc", STREAMS, 1)
    tensors |= maker.block(shape.layers, 0, is_hashed=False)
    tensors |= {f"{p}.{name}": maker.norm(n) for name in ("enorm", "hnorm", "shared_head_norm")}
    return tensors | {f"{p}.eh_proj": maker.matrix(n, 2 * n)}


def _add_metadata(w: gguf.GGUFWriter, s: TinyStreams, n_mtp: int) -> None:
    n_block = s.layers + n_mtp
    whole = {
        "block_count": n_block,
        "context_length": 4096,
        "embedding_length": s.hidden,
        "embedding_length_out": STREAMS * s.hidden,
        "vocab_size": VOCAB,
        "attention.head_count": s.heads,
        "attention.head_count_kv": 1,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.q_lora_rank": s.q_rank,
        "attention.sliding_window": s.window,
        "attention.output_group_count": s.groups,
        "attention.output_lora_rank": s.out_rank,
        "attention.indexer.head_count": N_INDEX_HEAD,
        "attention.indexer.key_length": INDEX_DIM,
        "attention.indexer.top_k": s.top_k,
        "rope.dimension_count": s.n_rot,
        "rope.scaling.original_context_length": 256,
        "expert_count": s.experts[0],
        "expert_used_count": s.experts[1],
        "expert_feed_forward_length": s.ffn,
        "expert_shared_count": 1,
        "expert_gating_func": 4,
        "hyper_connection.count": STREAMS,
        "hyper_connection.sinkhorn_iterations": SINKHORN,
        "hash_layer_count": s.n_hash,
    }
    numbers = {
        "attention.layer_norm_rms_epsilon": EPS,
        "attention.compress_rope_freq_base": 160000.0,
        "rope.freq_base": 10000.0,
        "rope.scaling.factor": 16.0,
        "expert_weights_scale": s.scale,
        "hyper_connection.epsilon": FLOOR,
    }
    for name, value in whole.items():
        w.add_uint32(f"deepseek4.{name}", value)
    for name, number in numbers.items():
        w.add_float32(f"deepseek4.{name}", number)
    w.add_bool("deepseek4.expert_weights_norm", True)
    w.add_string("deepseek4.rope.scaling.type", "yarn")
    w.add_array("deepseek4.attention.compress_ratios", [*s.ratios, 0])
    for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        w.add_array(f"deepseek4.{name}", [s.limit] * n_block)
    if n_mtp:
        w.add_uint32("deepseek4.nextn_predict_layers", n_mtp)


def write(path: Path, shape: TinyStreams, tensors: Tensors, n_mtp: int) -> None:
    """A file of these tensors."""
    typed = ((name if name.endswith(".bias") else f"{name}.weight", value, None) for name, value in tensors.items())
    save(
        path, "deepseek4", typed, partial(_add_metadata, s=shape, n_mtp=n_mtp), partial(add_tokenizer, pre="joyai-llm")
    )


if __name__ == "__main__":
    for shape in SHAPES:
        folder = Path(sys.argv[1])
        write(folder / f"{shape.name}.gguf", shape, trunk(shape), 0)
        write(folder / f"{shape.name}_mtp.gguf", shape, mtp(shape), 1)
