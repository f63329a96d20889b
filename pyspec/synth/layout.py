"""Metadata of a model by its dimensions, and its tensors: those that the reader of such metadata wants."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pyspec.draft import dflash2, dflash_file, dspark, eagle3
from pyspec.draft.dflash_file import CONVOLUTION, MARKOV, SELECTOR, DFlashConfig, drafter_tensors
from pyspec.draft.dspark_heads import SURE_BIAS
from pyspec.gguf import GGMLType, GGUFFile, ValueType, open_gguf
from pyspec.gguf.write import GGUFWriter, Value
from pyspec.models import read_config
from pyspec.models.mtp import EH_PROJ
from pyspec.models.own_vocabulary import D2T
from pyspec.models.residual import HEAD_MIX
from pyspec.models.wants import EMBEDDING, HEAD, Want, scale_of
from pyspec.synth.dims import Dims

Key = tuple[str, Value, ValueType]
U32 = ValueType.UINT32
TYPES = {bool: ValueType.BOOL, int: U32, float: ValueType.FLOAT32, str: ValueType.STRING}
BY_FIELD = {
    "n_embd": "embedding_length",
    "n_head": "attention.head_count",
    "n_head_kv": "attention.head_count_kv",
    "window": "attention.sliding_window",
    "sliding": "attention.sliding_window_pattern",
    "sections": "rope.dimension_sections",
    "q_rank": "attention.q_lora_rank",
    "rank": "attention.kv_lora_rank",
    "n_value": "attention.value_length_mla",
    "out_rank": "attention.output_lora_rank",
    "n_stream": "hyper_connection.count",
    "n_gated": "hyper_connection.count",
    "low": "hyper_connection.low_rank",
    "n_expert": "expert_count",
    "n_used": "expert_used_count",
    "n_ff_shared": "expert_shared_feed_forward_length",
    "n_shared": "expert_shared_count",
    "n_dense": "leading_dense_block_count",
    "routed_scale": "expert_weights_scale",
    "latent": "moe_latent_size",
    "state": "ssm.state_size",
    "kda": "kda.head_dim",
}
"""Keys that a field other than 0 gives as it is."""

ALWAYS = ("nextn.shared_head_norm.weight", "layer_output_norm.weight", SURE_BIAS)
"""Optional tensors that each file has whose reader knows them, besides those of `Dims.has`."""
U64_KEYS = ("ple.layer_multipliers", "ple.head_offsets", "ple.head_vocab_sizes")
POINTED = 2.0
KINDS = {
    "embedding": ("token_embd.weight", "per_layer_token_embd.weight"),
    "head": ("output.weight",),
    "ids": ("*_tid2eid.weight",),
    "choice": ("d2t",),
    "divisors": ("rope_freqs.weight",),
    "norm": ("*norm*.weight", "*_scale.weight", "*.scale", "ssm_d"),
    "gate": ("ssm_alpha.*", "ssm_beta.*", "ssm_ba.*", "ssm_[fg]_[ab].*", "indexer.proj.*", "attn_[kv]_b.*", "ffn_latent_*", "*_conv_proj.*", "*hc_*_inject.*", "indexer.[qk]_proj.*"),
    "router": ("ffn_gate_inp*.weight", "exp_probs_b.bias", "*_ape.weight", "*hc_*_fn.*", "*hc_*_base.*", "output_hc_fn.*", "output_hc_base.*", "output_hc_scale.*", "attn_sinks.*", "conf_proj.*"),
    "conv": ("ssm_conv1d*", "ple_conv1d.*", "shortconv.conv.*", "*_conv_base"),
    "decay": ("ssm_a",),
    "step": ("ssm_dt.bias",),
    "bias": ("*.bias",),
}  # fmt: skip
"""The kind of a tensor's values, by its name without block: the first that fits, else "matrix"."""
GAINS: dict[str, float] = {
    **dict.fromkeys(("attn_[qk].weight", "attn_output.weight", "attn_[qk]_norm.weight", "attn_q_b.weight"), POINTED),
    **dict.fromkeys(("attn_kv.weight", "attn_kv_a_mqa.weight", "attn_k_b.weight", "shortconv.out_proj.weight"), POINTED),
    **dict.fromkeys(("ffn_gate_inp.weight", "ffn_down_exps.weight"), POINTED),
    "*_conv_proj.weight": 0.3,
    "rope_freqs.weight": 0.25,
}  # fmt: skip
"""Factors on the usual size. Queries and keys have twice that: with flat attention the text would depend on the last token alone, and
loop. Down matrices of experts, too, because a row's expert weights sum to one and the experts' outputs partly cancel."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor: its shape in torch order, the kind of its values (a name of KINDS, see `fill`), and a factor on their usual size.

    rows: factors on those of a matrix, or ().
    For "ids", whole numbers without repetition in a row, and "choice", whole numbers that rise, `gain` is their upper limit; for "divisors"
    of frequencies it is the share of pairs that turn.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    gain: float = 1.0
    rows: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a model in the file. mtp: blocks of multi-token prediction"""

    trunk: bool = True
    mtp: int = 0


def parts_of(dims: Dims, *, mtp: bool = True, sidecar: bool = False) -> Parts:
    """The parts in a file of this model, or in its sidecar."""
    return Parts(not sidecar, dims.mtp if mtp and (sidecar or not dims.mtp_alone) else 0)


def file_arch(dims: Dims) -> str:
    """`general.architecture`."""
    return "dflash-draft" if dims.fork else dims.arch


def metadata(dims: Dims, parts: Parts) -> Iterator[Key]:
    """All keys except general.* and tokenizer.* (but the mask token of drafters)."""
    given = dict(dims.keys)
    for name, value in (given | _keys(dims, dims.n_layer + parts.mtp) | given).items():
        first = value[0] if isinstance(value, list | tuple) else value
        kind = ValueType.INT32 if name == BY_FIELD["sections"] else TYPES[type(first)]
        kind = ValueType.UINT64 if name in U64_KEYS else kind
        key = name if name.startswith("tokenizer.") else f"{file_arch(dims)}.{name}"
        yield key, list(value) if isinstance(value, tuple) else value, kind
    if parts.mtp:
        yield f"{dims.arch}.nextn_predict_layers", parts.mtp, U32


def _keys(dims: Dims, n_block: int) -> dict[str, Any]:
    """By name without architecture."""
    d, blocks = dims, range(n_block)
    own: dict[str, Any] = {
        "block_count": n_block,
        "context_length": d.n_ctx,
        "vocab_size": d.n_vocab,
        "attention.key_length": d.head_dim,
        "attention.value_length": d.head_dim,
        "attention.layer_norm_rms_epsilon": d.eps,
        "rope.freq_base": d.rope_base,
        "rope.dimension_count": d.n_rot or d.head_dim,
    }
    own |= {name: value for field, name in BY_FIELD.items() if (value := getattr(d, field))}
    if not (d.n_v_head and d.n_expert) and not d.n_stream:
        own["feed_forward_length"] = d.n_ff
    if d.n_expert:
        own["expert_feed_forward_length"] = d.n_ff_expert or d.n_ff
    if d.expert_groups[0] > 1:
        own |= dict(zip(("expert_group_count", "expert_group_used_count"), d.expert_groups, strict=True))
    if d.convolved:
        kv = [0 if i in d.convolved else d.n_head_kv for i in blocks]
        own |= {"shortconv.l_cache": d.n_conv, "attention.head_count_kv": kv}
    if d.state:
        heads, dim = (d.n_v_head, d.state) if d.n_v_head else (d.mamba_heads, d.mamba_dim)
        own |= {"ssm.conv_kernel": d.n_conv, "ssm.group_count": d.n_k_head or d.n_group}
        own |= {"ssm.time_step_rank": heads, "ssm.inner_size": heads * dim}
    if d.n_v_head:
        own["full_attention_interval"] = d.interval
    if d.pattern:
        kinds = d.pattern + "+" * (n_block - d.n_layer)
        own["attention.head_count_kv"] = [d.n_head_kv if b in "*+" else 0 for b in kinds]
        own["feed_forward_length"] = [d.n_ff if b in "-E+" else 0 for b in kinds]
        own["attention.layer_norm_epsilon"] = d.eps
    if d.rank:
        own |= {"attention.key_length": d.rank + d.n_rot, "attention.value_length": d.rank}
        own |= {"attention.key_length_mla": d.head_dim, "attention.head_count_kv": 1}
    if d.kda:
        own["ssm.conv_kernel"] = d.n_conv
        own["attention.head_count_kv"] = [
            int((i + 1) % d.interval == 0 or i + 1 >= d.n_layer) for i in blocks
        ]
    if d.n_near_head:
        own["attention.head_count"] = [d.n_near_head if x else d.n_head for x in d.sliding]
    if d.near_dim:
        near = [(i + 1) % d.interval != 0 for i in blocks]
        own["attention.head_count_kv"] = [d.n_near_kv if x else d.n_head_kv for x in near]
        own["attention.sliding_window_pattern"] = near
        names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
        own |= dict.fromkeys([f"{name}_swa" for name in names], d.near_dim)
        own |= {"attention.shared_kv_layers": d.n_sharing, "embedding_length_per_layer_input": d.n_input}
    if d.n_stream:
        own |= {"embedding_length_out": d.n_stream * d.n_embd, "hash_layer_count": d.n_hash}
        own |= {"attention.output_group_count": d.n_group, "attention.compress_ratios": [*d.ratios, 0]}
        own |= dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp"), [d.limit] * n_block)
    if d.indexer[0]:
        names = ("head_count", "key_length", "top_k")
        own |= {f"attention.indexer.{x}": n for x, n in zip(names, d.indexer, strict=True)}
    own |= _gated_keys(d, n_block) if d.n_gated else {}
    return own | (_drafter_keys(d) if d.kind else {})


def _gated_keys(dims: Dims, n_block: int) -> dict[str, Any]:
    """Of streams that gates read: which blocks have an index, and the table of n-grams."""
    is_full = [(i + 1) % dims.interval == 0 or i >= dims.n_layer for i in range(n_block)]
    layer, n_gram, per, taps, size = dims.ngrams
    n_head = (n_gram - 1) * per
    return {
        "attention.compress_ratios": [dims.ratio * full for full in is_full],
        "ple.layers": [layer],
        "ple.ngram_size": n_gram,
        "ple.heads_per_ngram": per,
        "ple.conv_kernel": taps,
        "ple.eos_token_id": dims.n_vocab - 1,
        "ple.layer_multipliers": [(1 << 45) - 55 - 2 * i for i in range(n_gram)],
        "ple.head_vocab_sizes": [size] * n_head,
        "ple.head_offsets": [size * i for i in range(n_head)],
        "embedding_length_per_layer_input": dims.n_embd // n_head,
    }


def _drafter_keys(dims: Dims) -> dict[str, Any]:
    taps = [tap + 1 for tap in dims.taps]
    if dims.fork:
        return {
            "attention.causal": False,
            "dflash.block_size": dims.block,
            "dflash.mask_token_id": dims.mask_id,
            "dflash.target_layer_ids": dims.taps,
            "dflash.n_target_features": len(taps) * dims.n_target_embd,
        }
    if dims.kind == "eagle3":
        flags = dict.fromkeys(("norm_before_residual", "norm_before_fc"), False)
        return {"target_layers": dims.taps, "target_hidden_size": dims.n_target_embd, **flags}
    own: dict[str, Any] = {"block_size": dims.block, "target_layers": taps}
    own["tokenizer.ggml.mask_token_id"] = dims.mask_id
    if dims.mrope:
        own["rope.dimension_sections"] = [dims.head_dim // 2, 0, 0, 0]
    if dims.kind == "dflash2":
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        own |= dict(zip(names, (*dims.convolution, *dims.selector), strict=True))
    if dims.kind == "dspark":
        own |= {"sample_from_anchor": True, "has_confidence_head": True}
    return own


def tensors(dims: Dims, parts: Parts) -> Iterator[Spec]:
    """The tensors that the reader wants; of the optional ones those of `dims.has`, and the head if it is not the embedding."""
    with _probe(dims, parts) as file:
        wants = _drafter_wants(dims, file) if dims.kind else _model_wants(dims, file, parts)
    has = (*dims.has, *ALWAYS)
    hashed = {f"blk.{i}.exp_probs_b.bias" for i in range(dims.n_hash)}
    for name, want in wants.items():
        is_there = not dims.tied if name == HEAD else not want.optional or _part(name) in has
        if is_there and not (want.optional and name in hashed):
            yield _spec(dims, name, want.shape)
        if (scale := scale_of(name)) not in wants and _part(scale) in has:
            yield _spec(dims, scale, want.shape[:1])


def _model_wants(dims: Dims, file: GGUFFile, parts: Parts) -> dict[str, Want]:
    c = read_config(file)
    wants = {name: want for name, want in c.tensors(file).items() if parts.trunk or "blk." not in name}
    if not parts.mtp or c.mtp is None:
        return wants
    with _probe(dims, Parts()) as target:
        return c.mtp.tensors(file, target) | wants


def _drafter_wants(dims: Dims, file: GGUFFile) -> dict[str, Want]:
    n = dims.n_target_embd
    if dims.kind == "eagle3":
        return eagle3.tensors(eagle3.read_eagle(file), file, n) | {D2T: Want((dims.n_drafts,))}
    c: DFlashConfig
    if dims.kind == "dflash":
        wants = drafter_tensors(c := dflash_file.read_config(file), file, n)
    elif dims.kind == "dflash2":
        wants = dflash2.tensors(c := dflash2.read_config(file), file, n, dims.n_vocab)
    else:
        wants = dspark.tensors(c := dspark.read_config(file), file, n, dims.n_vocab)
    return {c.alias.get(name, name): want for name, want in wants.items()}


@contextmanager
def _probe(dims: Dims, parts: Parts) -> Iterator[GGUFFile]:
    """A file with the metadata, and of the tensors, which are holes, those that readers look at."""
    with TemporaryDirectory(prefix="pyspec-") as folder:
        writer = GGUFWriter(Path(folder, "probe.gguf"), file_arch(dims))
        for key in metadata(dims, parts):
            writer.add(*key)
        for name, shape in _looked_at(dims, parts):
            writer.add_tensor_info(name, GGMLType.F32, shape)
        writer.write(None)
        with open_gguf(writer.path) as file:
            yield file


def _looked_at(dims: Dims, parts: Parts) -> Iterator[tuple[str, tuple[int, ...]]]:
    one = (1,)
    if not dims.kind:
        yield EMBEDDING, (dims.n_vocab, 1)
    if dims.n_drafts:
        yield HEAD, (dims.n_drafts, 1)
    if dims.markov:
        yield MARKOV, (1, dims.markov)
        yield f"{HEAD_MIX}_fn.weight", one
    if dims.kind == "dflash2":
        yield from ((name, one) for name in (SELECTOR, CONVOLUTION))
    for i in range(dims.n_layer + parts.mtp):
        names = {"attn_norm.weight", *dims.has}
        if dims.near_dim and (i + 1) % dims.interval:
            names.add("attn_v.weight")
        if dims.n_expert and dims.n_dense <= i < dims.n_layer:
            names.add("ffn_gate_inp.weight")
        yield from ((f"blk.{i}.{name}", one) for name in sorted(names))
    for i in range(parts.mtp):
        yield EH_PROJ.format(dims.n_layer + i), one


def _part(name: str) -> str:
    """Of a block, without its number."""
    return re.sub(r"^blk\.\d+\.", "", name)


@cache
def _usual(part: str) -> tuple[str, float]:
    kind = (kind for kind, names in KINDS.items() if any(fnmatchcase(part, n) for n in names))
    gain = (gain for name, gain in GAINS.items() if fnmatchcase(part, name))
    return next(kind, "matrix"), next(gain, 1.0)


def _spec(dims: Dims, name: str, shape: tuple[int, ...]) -> Spec:
    part, n = _part(name), dims.n_embd
    kind, gain = _usual(part)
    match kind:
        case "ids" | "choice":
            gain = dims.n_expert if kind == "ids" else dims.n_vocab
        case "head" | "embedding":
            gain = dims.louder if dims.tied == (kind == "embedding") else 1.0
    if dims.arch == "gpt-oss" and (kind == "bias" or part == "attn_sinks.weight"):
        kind, gain = "bias", 5.0
    if dims.arch.startswith("nemotron") and kind == "matrix" and "_exps" in part:
        gain = 1.0
    if dims.arch in ("gemma2", "gemma3", "gemma4") and part in (
        "post_attention_norm.weight",
        "post_ffw_norm.weight",
    ):
        # The embedding is scaled by sqrt(n_embd) and is the head, too: with less, a token repeats itself
        gain = max(1.0, (n / dims.n_layer) ** 0.5)
    if dims.n_stream and part == "attn_kv_a_norm.weight":
        gain = POINTED
    if (
        dims.arch == "gemma4"
    ):  # its scores are not scaled, and norms of heads give them the size that they have in other models
        if part.startswith("attn_") and part != "attn_norm.weight":
            gain = POINTED * shape[0] ** -0.25 if "norm" in part else 1.0
        if part == "ffn_gate_inp.scale":
            gain = n**0.5
    return Spec(name, shape, kind, gain)
