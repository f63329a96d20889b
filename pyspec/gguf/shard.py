"""One GGUF file on disk: header, metadata and tensor directory, parsed and checked in one pass.

All limits are those of the format or far above any real file; a file that breaks one is malformed, not large.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from pyspec.errors import BadGGUF
from pyspec.gguf.cursor import Cursor
from pyspec.gguf.fields import Fields
from pyspec.gguf.source import OpenFile
from pyspec.gguf.types import GGMLType, ValueType
from pyspec.ranges import quoted

MAX_KEYS = 65_536
MAX_TENSORS = 131_072  # the largest known file, every expert a tensor of its own, has 45,000
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 1_024
MAX_ELEMENTS = 16 << 20  # of a metadata array
MAX_WEIGHTS = 1 << 48  # of a tensor
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MIN_KEY_VALUE = 8 + 1 + 4 + 1  # key length, one character, type, the smallest value
MIN_TENSOR_INFO = 8 + 1 + 4 + 8 + 4 + 8  # name length, one character, n_dims, one dim, type, offset

_FORMATS = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
    ValueType.BOOL: "B",
}
SCALARS = {t: struct.Struct("<" + f) for t, f in _FORMATS.items()}
DTYPES = {t: np.dtype("<" + f) for t, f in _FORMATS.items()}
# an entry behind its n_dims, by n_dims
_ENTRIES = {n: struct.Struct(f"<{n}QIQ") for n in range(1, MAX_DIMS + 1)}
_TYPES = {int(t): (t, t.block_size, t.type_size) for t in GGMLType}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor directory. `shape` is torch order, slowest first; `offset` counts from the file's start."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    shard: int

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file."""

    path: Path
    source: OpenFile
    version: int
    alignment: int
    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]


def read_shard(path: Path) -> Shard:
    """Open and check one file. Errors: BadGGUF if it is malformed, ModelError if it cannot be opened."""
    source = OpenFile(path)
    try:
        if source.size < 24:
            raise BadGGUF(f"{path}: {source.size} bytes is too short for a GGUF header of 24 bytes")
        return _parse(Cursor(source))
    except BaseException:
        source.close()
        raise


def has_head(path: Path) -> bool:
    """True if the beginning of a file holds all of its metadata and its tensor directory. Errors: ModelError if it cannot be opened."""
    source = OpenFile(path)
    cursor = Cursor(source)
    try:
        _read_version(cursor)
        n_tensors = cursor.count(MIN_TENSOR_INFO, MAX_TENSORS, "the tensor count")
        _read_metadata(cursor, cursor.count(MIN_KEY_VALUE, MAX_KEYS, "the metadata count"))
        _read_directory(cursor, n_tensors)
    except BadGGUF:
        return False
    finally:
        source.close()
    return True


def _parse(cursor: Cursor) -> Shard:
    version = _read_version(cursor)
    n_tensors = cursor.count(MIN_TENSOR_INFO, MAX_TENSORS, "the tensor count")
    n_keys = cursor.count(MIN_KEY_VALUE, MAX_KEYS, "the metadata count")
    metadata = _read_metadata(cursor, n_keys)
    alignment = _alignment(cursor, metadata)
    entries = _read_directory(cursor, n_tensors)
    start = -(-cursor.at // alignment) * alignment
    tensors = _place(cursor, entries, start, alignment)
    return Shard(cursor.source.path, cursor.source, version, alignment, metadata, tensors)


def _read_version(cursor: Cursor) -> int:
    if (magic := cursor.bytes(4, "the magic")) != b"GGUF":
        raise cursor.bad(f"starts with {magic!r}, not with b'GGUF'; it is not a GGUF file")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version:
        flaw = "is that of a big-endian file; only little-endian files are read"
        raise cursor.bad(f"version {version:#x} {flaw}")
    if version not in (2, 3):
        raise cursor.bad(f"GGUF version {version} is not supported (2 and 3 are)")
    return version


def _read_metadata(cursor: Cursor, n_keys: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for index in range(n_keys):
        key = cursor.name(MAX_KEY_BYTES, "metadata key {} of {}", index, n_keys)
        if key in metadata:
            raise cursor.bad(f"metadata key {index} repeats {quoted(key)}")
        metadata[key] = _read_value(cursor, key)
    return metadata


def _value_type(cursor: Cursor, what: str, key: str) -> ValueType:
    number = cursor.u32(what, key)
    try:
        return ValueType(number)
    except ValueError:
        named = what.format(quoted(key))
        raise cursor.bad(f"{named} is {number}; 0..{max(ValueType)} are known") from None


def _read_value(cursor: Cursor, key: str) -> object:
    kind = _value_type(cursor, "the value type of {}", key)
    if kind is ValueType.ARRAY:
        return _read_array(cursor, key)
    if kind is ValueType.STRING:
        return cursor.string("{}", key)
    value = cursor.scalar(SCALARS[kind], "{}", key)
    return bool(value) if kind is ValueType.BOOL else value


def _read_array(cursor: Cursor, key: str) -> object:
    kind = _value_type(cursor, "the element type of {}", key)
    if kind is ValueType.ARRAY:
        flaw = f"is an array of arrays (element type {kind}), which is not allowed"
        raise cursor.bad(f"{quoted(key)} {flaw}")
    size = 8 if kind is ValueType.STRING else DTYPES[kind].itemsize
    n = cursor.count(size, MAX_ELEMENTS, "the element count of {}", key)
    if kind is ValueType.STRING:
        return cursor.strings(n, "{}", key)
    values = cursor.numbers(DTYPES[kind], n, "{}", key)
    if kind is ValueType.BOOL:
        values = values != 0
        values.setflags(write=False)
    return values


def _alignment(cursor: Cursor, metadata: dict[str, object]) -> int:
    fields = Fields(metadata, f"{cursor.source.path}: ")
    value = fields.integer("general.alignment", DEFAULT_ALIGNMENT)
    if value & (value - 1):
        raise cursor.bad(f"general.alignment is {value}, not a power of two in 8..65536")
    return value


def _read_directory(cursor: Cursor, n_tensors: int) -> dict[str, TensorInfo]:
    """The entries. Their offsets still count from the data section."""
    entries: dict[str, TensorInfo] = {}
    for index in range(n_tensors):
        name = cursor.name(MAX_NAME_BYTES, "the name of tensor {} of {}", index, n_tensors)
        if name in entries:
            raise cursor.bad(f"tensor {index} repeats the name {quoted(name)}")
        entries[name] = _read_info(cursor, name)
    return entries


def _read_info(cursor: Cursor, name: str) -> TensorInfo:
    n_dims = cursor.u32("the dimension count of {}", name)
    if not 1 <= n_dims <= MAX_DIMS:
        flaw = f"has {n_dims} dimensions; 1..{MAX_DIMS} are allowed"
        raise cursor.bad(f"tensor {quoted(name)} {flaw}")
    *sizes, number, offset = cursor.numbers_of(_ENTRIES[n_dims], "the directory entry of {}", name)
    ne, offset = tuple(map(int, sizes)), int(offset)
    if 0 in ne:
        raise cursor.bad(f"tensor {quoted(name)} has a dimension of 0: {list(ne)}")
    if (n := math.prod(ne)) > MAX_WEIGHTS:
        flaw = f"with dimensions {list(ne)} has {n} elements, more than {MAX_WEIGHTS}"
        raise cursor.bad(f"tensor {quoted(name)} {flaw}")
    if number not in _TYPES:
        raise cursor.bad(f"tensor {quoted(name)} has type {number}, which is not known")
    kind, block_size, type_size = _TYPES[int(number)]
    if ne[0] % block_size:
        flaw = f"a row of {ne[0]} is not a multiple of {kind.name}'s block of {block_size}"
        raise cursor.bad(f"tensor {quoted(name)}: {flaw}")
    while n_dims == MAX_DIMS and len(ne) > 2 and ne[-1] == 1:  # as converters have convolutions of KDA
        ne = ne[:-1]
    return TensorInfo(name, kind, ne[::-1], offset, n // block_size * type_size, 0)


def _place(
    cursor: Cursor, entries: dict[str, TensorInfo], start: int, alignment: int
) -> dict[str, TensorInfo]:
    """Check that the tensors lie in the file, aligned and apart, and make their offsets absolute."""
    for t in entries.values():
        if t.offset % alignment:
            flaw = f"has offset {t.offset}, not a multiple of the alignment {alignment}"
            raise cursor.bad(f"tensor {quoted(t.name)} {flaw}")
        if (end := start + t.offset + t.n_bytes) > cursor.size:
            why = f"tensor {quoted(t.name)} has {t.n_bytes} bytes at {start + t.offset}, up to {end}"
            raise cursor.bad(f"{why}; the file ends at {cursor.size}: is the download complete?")
    for a, b in pairwise(sorted(entries.values(), key=lambda t: t.offset)):
        if a.offset + a.n_bytes > b.offset:
            other = f"{quoted(a.name)} ({a.offset} + {a.n_bytes} bytes)"
            raise cursor.bad(f"tensor {quoted(b.name)} at offset {b.offset} overlaps {other}")
    placed = {}
    for name, t in entries.items():
        placed[name] = TensorInfo(name, t.type, t.shape, start + t.offset, t.n_bytes, 0)
    return placed
