"""Tiny random models for the tests: shapes, weights and the GGUF files that hold them.

Every weight comes from a generator seeded by the model's name, so a file can be made again bit by bit. Scales are
chosen so that the logits have a standard deviation of 1 to 3 and the recurrent layers remember tens of tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf
import numpy as np

VOCAB = 300
MERGES = (
    "t h|th e|Ġ the|i n|Ġ a|e r|o n|r e|Ġ t|Ġ s|a n|e n|Ġ w|o r|a t|Ġ in|in g|e s|Ġ o|i s|o u"
    "|Ġ an|Ġan d|l l|Ġ 1|1 2|d e|f ( |Ã ©|Ċ Ċ"
)
SPECIALS = {
    "<|endoftext|>": gguf.TokenType.CONTROL,
    "<|im_start|>": gguf.TokenType.CONTROL,
    "<|im_end|>": gguf.TokenType.CONTROL,
    "<|mask|>": gguf.TokenType.CONTROL,
    "<think>": gguf.TokenType.USER_DEFINED,
    "</think>": gguf.TokenType.USER_DEFINED,
}
PRE = {"llama": "llama-bpe", "qwen3": "qwen2", "qwen35": "qwen35", "qwen35moe": "qwen35"}
HYBRID = ("qwen35", "qwen35moe")
Q8_0, Q4_0 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Tiny:
    """Shape of one tiny model. `layers` counts the trunk; `mtp` adds one block after it.

    `experts`: (in all, used by a token); `ffn` is then the width of one, `shared_ffn` that of the shared expert.
    """

    name: str
    arch: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    quantised: bool = False
    tied: bool = False
    mtp: bool = False
    fused_qkv: bool = False
    rope_freqs: bool = False
    recurrent: tuple[bool, ...] | None = None
    quantised_gates: bool = False
    k_heads: int = 2
    v_heads: int = 4
    state: int = 16
    hidden: int = 64
    ffn: int = 64
    interval: int = 4
    rope_base: float = 1e4
    experts: tuple[int, int] = (0, 0)
    shared_ffn: int = 0
    fused_experts: bool = False
    coarse_experts: bool = False  # gates and ups of experts as Q4_0 in a quantised file

    @property
    def blocks(self) -> int:
        return self.layers + self.mtp

    def is_recurrent(self, block: int) -> bool:
        if self.arch not in HYBRID or block >= self.layers:
            return False
        return self.recurrent[block] if self.recurrent else (block + 1) % self.interval != 0


MODELS = (
    Tiny("llama", "llama", layers=2, heads=4, kv_heads=2, head_dim=16, rotary=16),
    Tiny("llama_freqs_tied", "llama", 2, 4, 1, 16, 16, tied=True, rope_freqs=True, rope_base=5e5),
    Tiny("llama_q8_0", "llama", 3, 4, 2, 32, 32, quantised=True, rope_freqs=True, rope_base=5e5),
    Tiny("qwen3", "qwen3", layers=2, heads=4, kv_heads=2, head_dim=16, rotary=16, rope_base=1e6),
    Tiny("qwen3_tied_q8_0", "qwen3", 3, 6, 2, 32, 32, quantised=True, tied=True, rope_base=1e6),
    Tiny("qwen35", "qwen35", 4, 2, 1, 32, 16, mtp=True, hidden=32, rope_base=1e5),
    Tiny(
        "qwen35_equal_tied",
        "qwen35",
        3,
        4,
        2,
        32,
        16,
        tied=True,
        fused_qkv=True,
        recurrent=(True, False, True),
        v_heads=2,
        state=32,
        hidden=32,
        rope_base=1e5,
    ),
    Tiny("qwen35_q8_0", "qwen35", 5, 4, 2, 32, 16, quantised=True, mtp=True, fused_qkv=True, rope_base=1e5),
    Tiny(
        "qwen35_full_heads_q8_0",
        "qwen35",
        2,
        2,
        1,
        256,
        64,
        quantised=True,
        tied=True,
        mtp=True,
        quantised_gates=True,
        recurrent=(True, False, False),
        state=128,
        rope_base=1e7,
    ),
    Tiny(
        "qwen35moe",
        "qwen35moe",
        4,
        2,
        1,
        32,
        16,
        mtp=True,
        hidden=32,
        ffn=32,
        rope_base=1e5,
        experts=(8, 3),
        shared_ffn=48,
    ),
    Tiny(
        "qwen35moe_fused_tied",
        "qwen35moe",
        3,
        4,
        2,
        32,
        16,
        tied=True,
        recurrent=(True, False, True),
        hidden=32,
        ffn=16,
        rope_base=1e5,
        experts=(16, 4),
        shared_ffn=32,
        fused_experts=True,
    ),
    Tiny(
        "qwen35moe_mixed_q8_0",
        "qwen35moe",
        3,
        4,
        2,
        32,
        16,
        quantised=True,
        mtp=True,
        ffn=32,
        interval=2,
        rope_base=1e5,
        experts=(8, 2),
        shared_ffn=32,
        coarse_experts=True,
    ),
)


def norm(rng: np.random.Generator, size: int) -> np.ndarray:
    return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)


def matrix(rng: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
    return (gain / np.sqrt(columns) * rng.standard_normal((rows, columns))).astype(np.float32)


def _attention(tiny: Tiny, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    n, width, kv_width = tiny.hidden, tiny.heads * tiny.head_dim, tiny.kv_heads * tiny.head_dim
    gate = 2 if tiny.arch in HYBRID else 1
    q, k, v = (matrix(rng, rows, n, gain) for rows, gain in ((gate * width, 1.5), (kv_width, 1.5), (kv_width, 1.0)))
    if tiny.fused_qkv:
        yield "attn_qkv.weight", np.concatenate([q, k, v])
    else:
        yield from (("attn_q.weight", q), ("attn_k.weight", k), ("attn_v.weight", v))
    yield "attn_output.weight", matrix(rng, n, width)
    if tiny.arch != "llama":
        yield "attn_q_norm.weight", norm(rng, tiny.head_dim)
        yield "attn_k_norm.weight", norm(rng, tiny.head_dim)


def _delta_net(tiny: Tiny, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    n, inner = tiny.hidden, tiny.v_heads * tiny.state
    channels = 2 * tiny.k_heads * tiny.state + inner
    yield "attn_qkv.weight", matrix(rng, channels, n, 1.5)
    yield "attn_gate.weight", matrix(rng, inner, n, 1.5)
    yield "ssm_alpha.weight", matrix(rng, tiny.v_heads, n)
    yield "ssm_beta.weight", matrix(rng, tiny.v_heads, n)
    yield "ssm_conv1d.weight", (0.5 * rng.standard_normal((channels, 4))).astype(np.float32)
    yield "ssm_a", -rng.uniform(0.5, 4, tiny.v_heads).astype(np.float32)
    step = rng.uniform(0.01, 0.2, tiny.v_heads)
    yield "ssm_dt.bias", np.log(np.expm1(step)).astype(np.float32)
    yield "ssm_norm.weight", norm(rng, tiny.state)
    yield "ssm_out.weight", matrix(rng, n, inner)


def _stack(rng: np.random.Generator, experts: int, rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
    return np.stack([matrix(rng, rows, columns, gain) for _ in range(experts)])


def _feed(tiny: Tiny, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    n, ffn, (experts, _) = tiny.hidden, tiny.ffn, tiny.experts
    if not experts:
        yield "ffn_gate.weight", matrix(rng, ffn, n, 1.5)
        yield "ffn_up.weight", matrix(rng, ffn, n, 1.5)
        yield "ffn_down.weight", matrix(rng, n, ffn)
        return
    yield "ffn_gate_inp.weight", matrix(rng, experts, n, 2.0)
    gate, up = _stack(rng, experts, ffn, n, 1.5), _stack(rng, experts, ffn, n, 1.5)
    if tiny.fused_experts:
        yield "ffn_gate_up_exps.weight", np.concatenate([gate, up], 1)
    else:
        yield from (("ffn_gate_exps.weight", gate), ("ffn_up_exps.weight", up))
    yield "ffn_down_exps.weight", _stack(rng, experts, n, ffn, 2.0)
    yield "ffn_gate_inp_shexp.weight", matrix(rng, 1, n)[0]
    yield "ffn_gate_shexp.weight", matrix(rng, tiny.shared_ffn, n, 1.5)
    yield "ffn_up_shexp.weight", matrix(rng, tiny.shared_ffn, n, 1.5)
    yield "ffn_down_shexp.weight", matrix(rng, n, tiny.shared_ffn)


def _block(tiny: Tiny, block: int, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    n = tiny.hidden
    yield "attn_norm.weight", norm(rng, n)
    yield from _delta_net(tiny, rng) if tiny.is_recurrent(block) else _attention(tiny, rng)
    yield "post_attention_norm.weight" if tiny.arch in HYBRID else "ffn_norm.weight", norm(rng, n)
    yield from _feed(tiny, rng)
    if block >= tiny.layers:
        yield "nextn.eh_proj.weight", matrix(rng, n, 2 * n)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            yield f"nextn.{name}.weight", norm(rng, n)


def weights(tiny: Tiny) -> Weights:
    """GGUF tensor name -> float32 array (out, in); the seed is a checksum of the name."""
    rng = np.random.default_rng(zlib.crc32(tiny.name.encode()))
    found = {"token_embd.weight": matrix(rng, VOCAB, tiny.hidden, 2.0), "output_norm.weight": norm(rng, tiny.hidden)}
    if not tiny.tied:
        found["output.weight"] = matrix(rng, VOCAB, tiny.hidden, 2.0)
    if tiny.rope_freqs:
        found["rope_freqs.weight"] = np.geomspace(1, 8, tiny.head_dim // 2).astype(np.float32)
    for block in range(tiny.blocks):
        found.update({f"blk.{block}.{name}": value for name, value in _block(tiny, block, rng)})
    return found


def type_of(tiny: Tiny, name: str, value: np.ndarray) -> gguf.GGMLQuantizationType | None:
    """The split of real Q8_0 files: every matrix but convolution and router, and the two gate projections in some; None for F32."""
    gates = name.endswith(("ssm_alpha.weight", "ssm_beta.weight"))
    plain = value.ndim < 2 or name.endswith(("conv1d.weight", "ffn_gate_inp.weight"))
    if not tiny.quantised or plain or (gates and not tiny.quantised_gates):
        return None
    return Q4_0 if tiny.coarse_experts and name.endswith(("gate_exps.weight", "up_exps.weight")) else Q8_0


def add_general(writer: gguf.GGUFWriter, name: str, quantised: bool) -> None:
    writer.add_name(f"tiny {name}")
    writer.add_license("Apache-2.0")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if quantised else gguf.LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add_metadata(writer: gguf.GGUFWriter, tiny: Tiny) -> None:
    add_general(writer, tiny.name, tiny.quantised)
    writer.add_block_count(tiny.blocks)
    writer.add_context_length(1024)
    writer.add_embedding_length(tiny.hidden)
    writer.add_feed_forward_length(tiny.ffn)
    writer.add_head_count(tiny.heads)
    writer.add_head_count_kv(tiny.kv_heads)
    writer.add_key_length(tiny.head_dim)
    writer.add_value_length(tiny.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(tiny.rope_base)
    writer.add_rope_dimension_count(tiny.rotary)
    writer.add_vocab_size(VOCAB)
    if tiny.arch in HYBRID:
        _add_hybrid_metadata(writer, tiny)
    if tiny.experts[0]:
        writer.add_expert_count(tiny.experts[0])
        writer.add_expert_used_count(tiny.experts[1])
        writer.add_expert_feed_forward_length(tiny.ffn)
        writer.add_expert_shared_feed_forward_length(tiny.shared_ffn)


def _add_hybrid_metadata(writer: gguf.GGUFWriter, tiny: Tiny) -> None:
    a, pairs = tiny.arch, tiny.rotary // 2
    writer.add_array(f"{a}.rope.dimension_sections", [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])
    writer.add_uint32(f"{a}.ssm.conv_kernel", 4)
    writer.add_uint32(f"{a}.ssm.state_size", tiny.state)
    writer.add_uint32(f"{a}.ssm.group_count", tiny.k_heads)
    writer.add_uint32(f"{a}.ssm.time_step_rank", tiny.v_heads)
    writer.add_uint32(f"{a}.ssm.inner_size", tiny.v_heads * tiny.state)
    if tiny.mtp:
        writer.add_uint32(f"{a}.nextn_predict_layers", 1)
    if tiny.recurrent:
        writer.add_array(f"{a}.attention.recurrent_layers", list(tiny.recurrent))
    else:
        writer.add_uint32(f"{a}.full_attention_interval", tiny.interval)


def add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    merges = MERGES.split("|")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    tokens = alphabet + [m.replace(" ", "") for m in merges]
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    fillers = VOCAB - len(tokens) - len(SPECIALS)
    tokens += [f"[PAD{i}]" for i in range(fillers)] + list(SPECIALS)
    kinds += [gguf.TokenType.UNUSED] * fillers + list(SPECIALS.values())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


Add = Callable[[gguf.GGUFWriter], None]
Typed = Iterable[tuple[str, np.ndarray, gguf.GGMLQuantizationType | None]]


def save(path: Path, arch: str, tensors: Typed, *add: Add) -> None:
    """Write a file: `add` puts in its metadata; tensors without a type are stored as they are."""
    writer = gguf.GGUFWriter(path, arch)
    for each in add:
        each(writer)
    for name, value, kind in tensors:
        if kind is None:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(path: Path, tiny: Tiny) -> None:
    """Write the model with its own types."""
    tensors = ((name, value, type_of(tiny, name, value)) for name, value in weights(tiny).items())
    save(path, tiny.arch, tensors, partial(_add_metadata, tiny=tiny), partial(add_tokenizer, pre=PRE[tiny.arch]))


def write_dequantised(source: Path, target: Path) -> None:
    """Copy a GGUF with every tensor as F32, so that llama.cpp does not quantise the activations."""
    reader = gguf.GGUFReader(source)
    arch = reader.get_field("general.architecture").contents()
    values = ((t.name, gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors)
    tensors = ((name, np.ascontiguousarray(value, dtype=np.float32), None) for name, value in values)
    save(target, arch, tensors, partial(_copy_metadata, reader=reader))


def _copy_metadata(writer: gguf.GGUFWriter, reader: gguf.GGUFReader) -> None:
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type=inner)
