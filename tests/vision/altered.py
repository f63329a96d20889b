"""Projector files that differ from a fixture's in fields and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from pyspec.cuda.ops.linear.dequant import quantize
from pyspec.gguf import GGMLType, TensorInfo, ValueType, open_gguf
from pyspec.gguf.write import GGUFWriter

IMAGES = Path(__file__).parents[1] / "fixtures/images"
NAMES = ("qwen35", "qwen3vl", "gemma3", "gemma4", "gemma4-e", "mistral3")
PICTURES = ("odd.png", "wide.jpg", "alpha.png", "grey.png")
_TYPES = {bool: ValueType.BOOL, int: ValueType.UINT32, float: ValueType.FLOAT32, str: ValueType.STRING}


def mmproj(name: str) -> Path:
    return IMAGES / f"mmproj-{name}.gguf"


def values(name: str) -> dict[str, np.ndarray]:
    """The tensors of a fixture, which are all F32."""
    with open_gguf(mmproj(name)) as file:
        return {k: file.raw(k).view(np.float32).reshape(t.shape) for k, t in file.tensors.items()}


def write(
    path: Path,
    fields: Mapping[str, object],
    tensors: Mapping[str, np.ndarray],
    types: Mapping[str, GGMLType] | None = None,
) -> Path:
    """types: of tensors that are not F32"""
    writer = GGUFWriter(path, "clip")
    for key, value in fields.items():
        if key == "general.architecture":
            continue
        first = value[0] if isinstance(value, list | np.ndarray) else value
        kind = _TYPES[type(first.item() if isinstance(first, np.generic) else first)]
        writer.add(key, value, ValueType.INT32 if kind is ValueType.UINT32 and first < 0 else kind)
    for name, t in tensors.items():
        writer.add_tensor_info(name, (types or {}).get(name, GGMLType.F32), t.shape)

    def packed(info: TensorInfo) -> list[np.ndarray]:
        value = torch.from_numpy(np.ascontiguousarray(tensors[info.name], np.float32))
        return [quantize(value, info.type).numpy().reshape(-1)]

    writer.write(packed)
    return path


def altered(
    path: Path,
    name: str,
    fields: Mapping[str, object | None] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    types: Mapping[str, GGMLType] | None = None,
) -> Path:
    """A fixture's projector with other fields, tensors and types; None leaves one out."""
    with open_gguf(mmproj(name)) as file:
        meta = {**file.metadata, **(fields or {})}
    every = {**values(name), **(tensors or {})}
    return write(
        path,
        {k: v for k, v in meta.items() if v is not None},
        {k: v for k, v in every.items() if v is not None},
        types,
    )
