"""Write a GGUF again with other names, metadata or tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from pyspec.gguf import GGMLType, TensorInfo, ValueType, open_gguf
from pyspec.gguf.write import GGUFWriter


def value_type(value: object) -> ValueType:
    for kind, type_ in ((bool, ValueType.BOOL), (int, ValueType.UINT32), (float, ValueType.FLOAT32)):
        if isinstance(value, kind):
            return type_
    return ValueType.STRING


def rewrite(
    source: Path,
    path: Path,
    *,
    arch: str = "",
    change: Mapping[str, object] | None = None,
    rename: Callable[[str], str] = lambda name: name,
    drop: Callable[[str], bool] = lambda name: False,
    add: Mapping[str, np.ndarray] | None = None,
    retype: Mapping[str, GGMLType] | None = None,
) -> Path:
    """`retype` gives tensors another type, and zeros. `change` gives metadata by new name (None leaves a key out); keys of the architecture move to `arch`; `add` are f32 tensors."""
    file = open_gguf(source)
    arch = arch or file.architecture
    metadata: dict[str, object] = {}
    for key, value in file.metadata.items():
        own = key.startswith(f"{file.architecture}.")
        metadata[f"{arch}.{key.split('.', 1)[1]}" if own else key] = value
    metadata |= change or {}
    writer = GGUFWriter(path, arch)
    for key, value in metadata.items():
        if value is not None and key != "general.architecture":
            plain = value.tolist() if isinstance(value, np.ndarray) else value
            plain = plain if isinstance(plain, str | bool | int | float) else list(plain)  # type: ignore[call-overload]
            kind = value_type(plain[0] if isinstance(plain, list) else plain)
            kind = ValueType.INT32 if key == "tokenizer.ggml.token_type" else kind  # llama.cpp insists
            if kind is ValueType.UINT32 and isinstance(plain, list) and max(plain) >= 1 << 32:
                kind = ValueType.UINT64
            writer.add(key, plain, kind)
    raw = {rename(name): file.raw(name) for name in file.tensors if not drop(name)}
    for name, info in file.tensors.items():
        if not drop(name):
            kind = (retype or {}).get(name, info.type)
            n_byte = info.n_elements // kind.block_size * kind.type_size
            raw[rename(name)] = raw[rename(name)] if kind is info.type else np.zeros(n_byte, np.uint8)
            writer.add_tensor_info(rename(name), kind, info.shape)
    for name, values in (add or {}).items():
        raw[name] = np.frombuffer(values.astype("<f4").tobytes(), np.uint8)
        writer.add_tensor_info(name, GGMLType.F32, values.shape)

    def fill(info: TensorInfo) -> Iterator[np.ndarray]:
        yield np.ascontiguousarray(raw[info.name])

    writer.write(fill)
    return path
