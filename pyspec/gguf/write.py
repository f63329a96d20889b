"""A streaming GGUF v3 writer: the header first, then tensor bytes as they come, so a file of any size needs little memory."""

from __future__ import annotations

import math
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pyspec.errors import ModelError, cannot_write
from pyspec.gguf.shard import DEFAULT_ALIGNMENT, DTYPES, SCALARS, TensorInfo
from pyspec.gguf.strings import Strings
from pyspec.gguf.types import GGMLType, ValueType

Scalar = int | float | bool | str
Value = Scalar | list[str] | Strings | list[int] | list[float] | list[bool] | np.ndarray
Bytes = bytes | bytearray | memoryview | np.ndarray
N_WRITER = min(8, os.cpu_count() or 1)
Fill = Callable[[TensorInfo], Iterable[Bytes]]


class GGUFWriter:
    """Collects metadata and the tensor directory, then writes the file in one pass.

    The file is written as `<name>.part` and moved to its name when complete.
    """

    def __init__(self, path: str | Path, arch: str, alignment: int = DEFAULT_ALIGNMENT) -> None:
        self.path = Path(path)
        self.alignment = alignment
        self.tensors: dict[str, TensorInfo] = {}
        self._keys: set[str] = set()
        self._metadata: list[bytes] = []
        self._end = 0  # of the data section so far
        self.add("general.architecture", arch, ValueType.STRING)
        if alignment != DEFAULT_ALIGNMENT:
            self.add("general.alignment", alignment, ValueType.UINT32)

    @property
    def n_bytes(self) -> int:
        """Bytes of tensor data, padding included."""
        return self._end

    def add(self, key: str, value: Value, type: ValueType) -> None:
        """Add a metadata value; a list or numpy array becomes an array whose elements are of `type`."""
        if key in self._keys:
            raise ModelError(f"metadata key {key!r} is added twice")
        self._keys.add(key)
        if isinstance(value, list | Strings | np.ndarray):
            head = struct.pack("<IIQ", ValueType.ARRAY, type, len(value))
            packed = head + _packed_array(value, type)
        else:
            packed = struct.pack("<I", type) + _packed_scalar(value, type)
        self._metadata.append(_string(key) + packed)

    def add_tensor_info(self, name: str, type: GGMLType, shape: Sequence[int]) -> TensorInfo:
        """Add a directory entry; `shape` is in torch order. Data is written in the order of these calls."""
        if name in self.tensors:
            raise ModelError(f"tensor {name!r} is added twice")
        if shape[-1] % type.block_size:
            block = f"{type.name}'s block {type.block_size}"
            raise ModelError(f"tensor {name!r}: rows of {shape[-1]} are not a multiple of {block}")
        n_bytes = math.prod(shape) // type.block_size * type.type_size
        info = TensorInfo(name, type, tuple(shape), self._end, n_bytes, 0)
        self.tensors[name] = info
        self._end += self._padded(n_bytes)
        return info

    def write(self, fill: Fill | None) -> None:
        """Write the file. `fill(info)` yields the tensor's bytes in pieces of any size; `info.offset` counts from the data section.
        Raises ConfigError if the file can not be written.

        Earlier pieces are still being written when the next one is asked for, so a piece must not change after it is yielded.
        None writes zeros, which take no room where the file system has holes.
        """
        part = self.path.with_name(self.path.name + ".part")
        try:
            with part.open("wb", buffering=1 << 20) as out:
                header = self._header()
                out.write(header + bytes(self._padded(len(header)) - len(header)))
                if fill is None:
                    out.truncate(out.tell() + self._end)
                else:
                    self._fill(out, fill)
            os.replace(part, self.path)
        except OSError as error:
            raise cannot_write(self.path, error) from None
        finally:
            part.unlink(missing_ok=True)

    def _fill(self, out: BinaryIO, fill: Fill) -> None:
        """Write several pieces at a time: a single thread reaches only 1 GB a second."""
        start = out.tell()
        out.truncate(start + self._end)
        with ThreadPoolExecutor(N_WRITER) as pool:
            written: deque[Future[None]] = deque()
            for info in self.tensors.values():
                n = 0
                for piece in fill(info):
                    if not len(piece):
                        continue
                    raw = piece.data if isinstance(piece, np.ndarray) else piece
                    view = memoryview(raw).cast("B")
                    at = start + info.offset + n
                    written.append(pool.submit(_write_at, out.fileno(), view, at))
                    n += len(view)
                    if len(written) > 2 * N_WRITER:
                        written.popleft().result()
                if n != info.n_bytes:
                    given = f"{n} were given"
                    raise ModelError(f"tensor {info.name!r} takes {info.n_bytes} bytes, {given}")
            for each in written:
                each.result()

    def _padded(self, n: int) -> int:
        return -(-n // self.alignment) * self.alignment

    def _header(self) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self._metadata))
        directory = (_directory_entry(t) for t in self.tensors.values())
        return head + b"".join(self._metadata) + b"".join(directory)


def _write_at(file: int, data: memoryview, offset: int) -> None:
    while data:
        n = os.pwrite(file, data, offset)
        data, offset = data[n:], offset + n


def _directory_entry(info: TensorInfo) -> bytes:
    n = len(info.shape)
    place = struct.pack(f"<I{n}QIQ", n, *reversed(info.shape), info.type, info.offset)
    return _string(info.name) + place


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _packed_scalar(value: Scalar, type: ValueType) -> bytes:
    if type is ValueType.STRING:
        return _string(str(value))
    try:
        return SCALARS[type].pack(value)
    except struct.error as error:
        raise ModelError(f"{value!r} does not fit {type.name}: {error}") from None


def _packed_array(
    values: list[str] | Strings | list[int] | list[float] | list[bool] | np.ndarray, type: ValueType
) -> bytes:
    if type is ValueType.STRING:
        return b"".join(_string(str(v)) for v in values)
    return np.asarray(values).astype(DTYPES[type]).tobytes()
