"""Random models as GGUF files: structurally complete, deterministic, with weights that keep logits finite and varied.

For tests and timing. `write("qwen3.6-27b", path)` has every tensor and key of the real file; `tiny=True` gives the same
architecture in a few hundred kilobytes, with a vocabulary that encodes and decodes text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np

from pyspec.errors import ConfigError
from pyspec.gguf import GGMLType, LlamaFileType, TensorInfo, ValueType
from pyspec.gguf.write import GGUFWriter
from pyspec.models.wants import scale_of
from pyspec.synth import layout, vocab
from pyspec.synth.dims import MODELS, TINY, Dims, find, shortened, widened
from pyspec.synth.drafters import drafter_of, made_for
from pyspec.synth.fill import Filler
from pyspec.synth.layout import Parts, Spec
from pyspec.synth.routing import ROUTING, routed

__all__ = ["MODELS", "QUANTS", "TINY", "Dims", "Recipe", "drafter_of", "find", "write"]

QUANTS: dict[str, LlamaFileType] = {
    "f32": LlamaFileType.F32,
    "f16": LlamaFileType.F16,
    "bf16": LlamaFileType.BF16,
    "q8_0": LlamaFileType.Q8_0,
    "q4_0": LlamaFileType.Q4_0,
    "q4_1": LlamaFileType.Q4_1,
    "q5_0": LlamaFileType.Q5_0,
    "q5_1": LlamaFileType.Q5_1,
    "q2_k": LlamaFileType.Q2_K,
    "q3_k": LlamaFileType.Q3_K_M,
    "q4_k": LlamaFileType.Q4_K_M,
    "q5_k": LlamaFileType.Q5_K_M,
    "q6_k": LlamaFileType.Q6_K,
    "iq2_xxs": LlamaFileType.IQ2_XXS,
    "iq3_xxs": LlamaFileType.IQ3_XXS,
    "iq4_nl": LlamaFileType.IQ4_NL,
    "iq4_xs": LlamaFileType.IQ4_XS,
    "mxfp4": LlamaFileType.MXFP4_MOE,
    "nvfp4": LlamaFileType.NVFP4,
}
OF_EXPERTS = ("mxfp4", "nvfp4", "q4_k", "q3_k", "iq3_xxs", "iq2_xxs")
QUANTS |= {f"{name}_moe": QUANTS[name] for name in OF_EXPERTS}
"""Names for `quant`, with their file types."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The contents of a model file.

    quant    type of the matrices, a key of QUANTS; norms and other small tensors are F32
    mtp      with the multi-token-prediction block, if the model has one
    sidecar  only that block, the embedding and the head
    drafter  the drafter of the entry, of the kind `dflash`, `dflash2`, `dspark` or `eagle3`; `fork` with the naming of older forks
    n_layer  number of the target's layers; 0: all of them
    routing  of experts, a key of `placement.HITS`; "": as random weights have it, which differs by architecture
    hollow   zeros in all tensors, as holes that use no disk space: for inspection, not for running
    """

    quant: str = "q8_0"
    seed: int = 0
    tiny: bool = False
    mtp: bool = True
    drafter: bool = False
    kind: str = "dflash"
    sidecar: bool = False
    fork: bool = False
    n_layer: int = 0
    routing: str = ""
    hollow: bool = False


class RecipeOptions(TypedDict, total=False):
    """The fields of Recipe as keyword arguments."""

    quant: str
    seed: int
    tiny: bool
    mtp: bool
    drafter: bool
    kind: str
    sidecar: bool
    fork: bool
    n_layer: int
    routing: str
    hollow: bool


def write(
    entry: str | Dims,
    out_path: str | Path,
    *,
    progress: Progress | None = None,
    **options: Unpack[RecipeOptions],
) -> Path:
    """Write one model and return its path.

    entry     a name of MODELS (with `tiny` also one of TINY), or dimensions of one's own
    progress  called with the tensor bytes done and their total
    options   the fields of Recipe
    Errors: ConfigError for an unknown name or an impossible combination, ModelError if the file cannot be written.
    """
    recipe = Recipe(**options)
    dims, quant = _resolve(entry, recipe), recipe.quant
    if recipe.sidecar and not (dims.mtp and recipe.mtp):
        why = "has no MTP block for a sidecar file, or mtp is False"
        raise ConfigError(f"{dims.name} ({dims.arch}) {why}")
    parts = layout.parts_of(dims, mtp=recipe.mtp, sidecar=recipe.sidecar)
    writer = GGUFWriter(out_path, layout.file_arch(dims))
    _add_metadata(writer, dims, parts, recipe)
    every = layout.tensors(dims, parts)
    every = routed(dims, every, recipe.routing, recipe.seed) if recipe.routing else every
    specs = {spec.name: spec for spec in every}
    kinds = {name: _type_of(spec, dims, quant) for name, spec in specs.items()}
    mtp = f"blk.{dims.n_layer}."
    unscaled = frozenset(n for n in specs if n.startswith(mtp) or scale_of(n) in specs)
    largest: dict[GGMLType, int] = {}
    for name, spec in specs.items():
        blocks = int(np.prod(spec.shape)) // kinds[name].block_size
        largest[kinds[name]] = max(largest.get(kinds[name], 0), blocks)
        writer.add_tensor_info(name, kinds[name], spec.shape)
        # llama.cpp skips an MTP block unless it is requested, and then refuses the block's scales
        if kinds[name] is GGMLType.NVFP4 and name not in unscaled:
            writer.add_tensor_info(scale_of(name), GGMLType.F32, _scales(spec))
    filler = Filler(recipe.seed, largest, unscaled)
    writer.write(None if recipe.hollow else _fill(writer, specs, filler, progress))
    if progress is not None:
        progress(writer.n_bytes, writer.n_bytes)
    return writer.path


def _resolve(entry: str | Dims, recipe: Recipe) -> Dims:
    if recipe.quant not in QUANTS:
        raise ConfigError(f"no quantisation {recipe.quant!r}; known are {', '.join(QUANTS)}")
    dims = find(entry, tiny=recipe.tiny) if isinstance(entry, str) else entry
    if recipe.tiny and _named(recipe.quant).block_size > dims.n_embd:
        dims = widened(dims)
    if recipe.n_layer:
        dims = shortened(dims, recipe.n_layer)
    if recipe.drafter:
        return dims if dims.kind else made_for(dims, recipe.kind, fork=recipe.fork)
    return replace(dims, fork=True) if recipe.fork and dims.kind == "dflash" else dims


def _add_metadata(writer: GGUFWriter, dims: Dims, parts: Parts, recipe: Recipe) -> None:
    writer.add("general.name", f"{dims.name} (random weights)", ValueType.STRING)
    if recipe.routing:
        writer.add(ROUTING, recipe.routing, ValueType.STRING)
    writer.add("general.file_type", int(QUANTS[recipe.quant]), ValueType.UINT32)
    writer.add("general.quantization_version", 2, ValueType.UINT32)
    for key, value, kind in layout.metadata(dims, parts):
        writer.add(key, value, kind)
    vocab.add_to(writer, vocab.make(dims))


def _named(quant: str) -> GGMLType:
    return GGMLType[quant.removesuffix("_moe").upper()]


def _type_of(spec: Spec, dims: Dims, quant: str) -> GGMLType:
    """The type that llama.cpp's quantiser chooses: finer for the head, F32 for small tensors, another type where rows do not fit a block.

    `_moe`: the type applies to experts only, the rest is Q8_0. Down projections of IQ2_XXS experts are Q2_K.
    """
    if spec.kind in ("ids", "choice"):
        return GGMLType.I32 if spec.kind == "ids" else GGMLType.I64
    if spec.kind not in ("matrix", "embedding", "head", "gate"):
        return GGMLType.F32
    kind, experts_alone = _named(quant), quant.endswith("_moe")
    is_head = spec.kind == "head" or (spec.kind == "embedding" and dims.tied)
    if kind.block_size == 256 and is_head:
        kind = GGMLType.Q6_K
    if kind in (GGMLType.MXFP4, GGMLType.NVFP4) and spec.kind != "matrix":
        kind = GGMLType.Q8_0
    if experts_alone and len(spec.shape) == 2:
        kind = GGMLType.Q8_0
    if experts_alone and kind is GGMLType.IQ2_XXS and spec.name.endswith("ffn_down_exps.weight"):
        kind = GGMLType.Q2_K
    if spec.shape[-1] % kind.block_size == 0:
        return kind
    return GGMLType.Q8_0 if spec.shape[-1] % 32 == 0 else GGMLType.F16


def _scales(spec: Spec) -> tuple[int]:
    """Shape of NVFP4's second-level scales: one, or one per expert."""
    return (spec.shape[0] if len(spec.shape) == 3 else 1,)


def _fill(
    writer: GGUFWriter, specs: dict[str, Spec], filler: Filler, progress: Progress | None
) -> Callable[[TensorInfo], Iterator[np.ndarray]]:
    def fill(info: TensorInfo) -> Iterator[np.ndarray]:
        if progress is not None:
            progress(info.offset, writer.n_bytes)
        if info.name in specs:
            yield from filler.bytes(specs[info.name], info.type)
        else:
            weight = specs[info.name.removesuffix(".scale") + ".weight"]
            yield np.full(_scales(weight), filler.second_scale(weight), "<f4").view(np.uint8)

    return fill
