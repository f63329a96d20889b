"""A file's contents as plain JSON-able data, for `pyspec inspect`."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from pyspec.gguf.reader import GGUFFile
from pyspec.gguf.shard import TensorInfo
from pyspec.gguf.strings import Strings

HEAD = 8  # elements of a long array that are shown
SHORT = 64  # arrays up to this long are shown whole


def describe(file: GGUFFile) -> dict[str, object]:
    """Paths, header, metadata, tensors and totals. Long arrays become {"type", "count", "head"}. Weights are not read."""
    by_type: Counter[str] = Counter()
    for tensor in file.tensors.values():
        by_type[tensor.type.name] += tensor.n_bytes
    return {
        "path": str(file.path),
        "paths": [str(p) for p in file.paths],
        "version": file.version,
        "alignment": file.alignment,
        "architecture": file.fields.label("general.architecture", ""),
        "file_type": file.file_type,
        "metadata": {_text(key): _shown(value) for key, value in file.metadata.items()},
        "tensors": [_tensor(t) for t in file.tensors.values()],
        "totals": {
            "tensors": len(file.tensors),
            "parameters": file.n_params,
            "tensor_bytes": sum(by_type.values()),
            "file_bytes": file.n_bytes,
            "bytes_by_type": dict(by_type.most_common()),
        },
    }


def _tensor(info: TensorInfo) -> dict[str, object]:
    return {
        "name": _text(info.name),
        "type": info.type.name,
        "shape": list(info.shape),
        "bytes": info.n_bytes,
        "offset": info.offset,
        "shard": info.shard,
    }


def _shown(value: object) -> object:
    if isinstance(value, np.ndarray):
        kind, items = str(value.dtype), value[: SHORT if len(value) <= SHORT else HEAD].tolist()
    elif isinstance(value, list | Strings):
        kind, items = "str", value[: SHORT if len(value) <= SHORT else HEAD]
    else:
        return _plain(value)
    head = [_plain(item) for item in items]
    return head if len(value) <= SHORT else {"type": kind, "count": len(value), "head": head}


def _plain(value: object) -> object:
    """Strings without lone surrogates, numbers without nan and infinity: both break JSON parsers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return _text(value) if isinstance(value, str) else value


def _text(value: str) -> str:
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
