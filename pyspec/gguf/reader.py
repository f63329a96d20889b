"""An opened model file, split or whole: metadata by key, tensors by name, their bytes straight from the mapping."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TypeVar, overload

import numpy as np

from pyspec.errors import BadGGUF, ModelError
from pyspec.gguf.shard import Shard, TensorInfo, read_shard
from pyspec.gguf.types import file_type_name

_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
MAX_SHARDS = 4_096
T = TypeVar("T")
Array = np.ndarray | list[str]


class _Required:
    """Marks a getter's key as one the file must have."""


_REQUIRED = _Required()


def open_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file; given any one of a split file's parts, open all of them.

    Errors: BadGGUF if the file is malformed or its parts do not fit together, ModelError if it cannot be opened.
    """
    path = Path(path)
    first = read_shard(path)
    if first.metadata.get("split.count", 0) in (0, 1):
        return GGUFFile(path, (first,))
    opened = [first]
    try:
        shards: list[Shard] = []
        for part in _split_paths(first):
            shards.append(first if part == path else read_shard(part))
            opened.append(shards[-1])
        _check_split(shards)
    except BaseException:
        for shard in opened:
            shard.data.close()
        raise
    return GGUFFile(path, tuple(shards))


def _split_paths(shard: Shard) -> list[Path]:
    """Paths of all parts, from the metadata and the name of one."""
    n = shard.metadata["split.count"]
    if type(n) is not int or not 2 <= n <= MAX_SHARDS:
        raise BadGGUF(f"{shard.path}: split.count is {str(n)[:40]!r}; an integer in 2..{MAX_SHARDS} is wanted")
    match = _SPLIT_NAME.match(shard.path.name)
    if match is None or int(match["count"]) != n:
        want = f"NAME-00001-of-{n:05}.gguf"
        raise BadGGUF(f"{shard.path}: one of {n} parts by its metadata, but not named like one ({want})")
    paths = [shard.path.with_name(f"{match['stem']}-{i:05}-of-{n:05}.gguf") for i in range(1, n + 1)]
    if missing := [p.name for p in paths if not p.exists()]:
        raise ModelError(f"{len(missing)} of {n} parts of {shard.path} are missing: {', '.join(missing[:8])}")
    return paths


def _check_split(shards: list[Shard]) -> None:
    owner: dict[str, Path] = {}
    for number, shard in enumerate(shards):
        for key, want in (("split.no", number), ("split.count", len(shards))):
            if (got := shard.metadata.get(key)) != want:
                raise BadGGUF(f"{shard.path}: {key} is {str(got)[:40]!r}, its name says {want}")
        if shard.version != shards[0].version:
            raise BadGGUF(
                f"{shard.path}: GGUF version {shard.version}, but {shards[0].path.name} has {shards[0].version}"
            )
        for name in shard.tensors:
            if name in owner:
                raise BadGGUF(f"{shard.path}: tensor {name!r} is in {owner[name].name} as well")
            owner[name] = shard.path
    total = shards[0].metadata.get("split.tensors.count")
    if total is not None and total != len(owner):
        raise BadGGUF(
            f"{shards[0].path}: split.tensors.count is {str(total)[:40]!r}, the {len(shards)} parts have {len(owner)} tensors"
        )


class GGUFFile:
    """Metadata and tensors of a model file. A context manager; views from `raw` keep their mapping alive after `close`.

    Metadata values are int, float, bool or str; arrays of numbers and bools are read-only numpy arrays, arrays of strings are
    list[str]. Strings that are not UTF-8 (byte tokens in some vocabularies) hold their odd bytes as lone surrogates:
    `s.encode("utf-8", "surrogateescape")` gives the file's bytes back.
    """

    def __init__(self, path: Path, shards: tuple[Shard, ...]) -> None:
        self.path = path
        self.paths = tuple(s.path for s in shards)
        self.version = shards[0].version
        self.alignment = shards[0].alignment
        self.n_bytes = sum(len(s.data) for s in shards)
        self.metadata: Mapping[str, object] = MappingProxyType(shards[0].metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_numbered(shards))
        self._maps = [s.data for s in shards]

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GGUFFile {self.path} with {len(self.tensors)} tensors>"

    def close(self) -> None:
        """Release the mappings. Harmless to repeat; a mapping with live views goes when the last view does."""
        for data in self._maps:
            with contextlib.suppress(BufferError):
                data.close()
        self._maps = []

    def raw(self, name: str) -> np.ndarray:
        """[n_bytes] uint8, read-only: the tensor's bytes in the mapping, not copied."""
        assert self._maps, f"{self.path} is closed"
        try:
            info = self.tensors[name]
        except KeyError:
            raise ModelError(f"{self.path}: no tensor {name!r}") from None
        return np.frombuffer(self._maps[info.shard], np.uint8, info.n_bytes, info.offset)

    @property
    def architecture(self) -> str:
        return self.get_str("general.architecture")

    @property
    def n_params(self) -> int:
        """Weights in all tensors."""
        return sum(t.n_elements for t in self.tensors.values())

    @property
    def file_type(self) -> str:
        """Name of `general.file_type`, e.g. "Q4_K_M"; "unknown" if absent."""
        return file_type_name(self.get_int("general.file_type", None))

    def _get(self, key: str, default: object, kinds: tuple[type, ...], wanted: str) -> object:
        value = self.metadata.get(key, default)
        if isinstance(value, _Required):
            raise ModelError(f"{self.path}: the metadata key {key!r} ({wanted}) is missing")
        if key in self.metadata and type(value) not in kinds:
            raise BadGGUF(f"{self.path}: {key} should be {wanted}, but it is {_described(value)}")
        return value

    @overload
    def get_int(self, key: str) -> int: ...
    @overload
    def get_int(self, key: str, default: T) -> int | T: ...
    def get_int(self, key: str, default: object = _REQUIRED) -> object:
        """An integer of any width. Errors: ModelError if missing without a default, BadGGUF if of another type."""
        return self._get(key, default, (int,), "an integer")

    @overload
    def get_float(self, key: str) -> float: ...
    @overload
    def get_float(self, key: str, default: T) -> float | T: ...
    def get_float(self, key: str, default: object = _REQUIRED) -> object:
        """A float; an integer in the file is taken as one."""
        value = self._get(key, default, (float, int), "a number")
        return float(value) if type(value) is int else value

    @overload
    def get_bool(self, key: str) -> bool: ...
    @overload
    def get_bool(self, key: str, default: T) -> bool | T: ...
    def get_bool(self, key: str, default: object = _REQUIRED) -> object:
        return self._get(key, default, (bool,), "a bool")

    @overload
    def get_str(self, key: str) -> str: ...
    @overload
    def get_str(self, key: str, default: T) -> str | T: ...
    def get_str(self, key: str, default: object = _REQUIRED) -> object:
        return self._get(key, default, (str,), "a string")

    @overload
    def get_array(self, key: str) -> Array: ...
    @overload
    def get_array(self, key: str, default: T) -> Array | T: ...
    def get_array(self, key: str, default: object = _REQUIRED) -> object:
        """An array of either kind: numpy for numbers and bools, list[str] for strings."""
        return self._get(key, default, (np.ndarray, list), "an array")

    @overload
    def get_numbers(self, key: str) -> np.ndarray: ...
    @overload
    def get_numbers(self, key: str, default: T) -> np.ndarray | T: ...
    def get_numbers(self, key: str, default: object = _REQUIRED) -> object:
        return self._get(key, default, (np.ndarray,), "an array of numbers")

    @overload
    def get_strings(self, key: str) -> list[str]: ...
    @overload
    def get_strings(self, key: str, default: T) -> list[str] | T: ...
    def get_strings(self, key: str, default: object = _REQUIRED) -> object:
        return self._get(key, default, (list,), "an array of strings")


def _numbered(shards: tuple[Shard, ...]) -> dict[str, TensorInfo]:
    """All tensors, each with the number of the part it lies in."""
    return {k: replace(t, shard=i) if i else t for i, s in enumerate(shards) for k, t in s.tensors.items()}


def _described(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype}"
    if isinstance(value, list):
        return f"an array of {len(value)} strings"
    return f"{type(value).__name__} {str(value)[:60]!r}"
