"""An opened model file, split or whole: metadata by key, tensors by name, and their bytes."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType, TracebackType

import numpy as np

from pyspec.errors import BadGGUF, ModelError
from pyspec.gguf.fields import Fields
from pyspec.gguf.read_ahead import ReadAhead
from pyspec.gguf.shard import Shard, TensorInfo, read_shard
from pyspec.gguf.types import file_type_name
from pyspec.ranges import quoted

# samples of a file's tensors, and bytes of each sample, in its fingerprint
SAMPLES, SAMPLE = 64, 4096
_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


def open_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file; given any one of a split file's parts, open all of them.

    Errors: BadGGUF if the file is malformed or its parts do not fit together, ModelError if it cannot be opened.
    """
    path = Path(path)
    first = read_shard(path)
    opened = [first]
    try:
        n = _fields(first).integer("split.count", 0)
        if n in (0, 1):
            return GGUFFile(path, (first,))
        shards: list[Shard] = []
        for part in _split_paths(first, n):
            shards.append(first if part == path else read_shard(part))
            opened.append(shards[-1])
        _check_split(shards)
    except BaseException:
        for shard in opened:
            shard.source.close()
        raise
    return GGUFFile(path, tuple(shards))


def _fields(shard: Shard) -> Fields:
    return Fields(shard.metadata, f"{shard.path}: ")


def _split_paths(shard: Shard, n: int) -> list[Path]:
    """Paths of all `n` parts, from the name of one."""
    match = _SPLIT_NAME.match(shard.path.name)
    if match is None or int(match["count"]) != n:
        want = f"NAME-00001-of-{n:05}.gguf"
        flaw = f"one of {n} parts by its metadata, but not named like one ({want})"
        raise BadGGUF(f"{shard.path}: {flaw}")
    names = [f"{match['stem']}-{i:05}-of-{n:05}.gguf" for i in range(1, n + 1)]
    paths = [shard.path.with_name(name) for name in names]
    if missing := [p.name for p in paths if not os.path.exists(p)]:
        listed = ", ".join(missing[:8])
        raise ModelError(f"{len(missing)} of {n} parts of {shard.path} are missing: {listed}")
    return paths


def _check_split(shards: list[Shard]) -> None:
    owner: dict[str, Path] = {}
    for number, shard in enumerate(shards):
        for key, want in (("split.no", number), ("split.count", len(shards))):
            if (got := _fields(shard).integer(key)) != want:
                raise BadGGUF(f"{shard.path}: {key} is {got}, its name says {want}")
        first = shards[0]
        if shard.version != first.version:
            other = f"{first.path.name} has {first.version}"
            raise BadGGUF(f"{shard.path}: GGUF version {shard.version}, but {other}")
        for name in shard.tensors:
            if name in owner:
                other = owner[name].name
                raise BadGGUF(f"{shard.path}: tensor {quoted(name)} is in {other} as well")
            owner[name] = shard.path
    total = _fields(shards[0]).integer("split.tensors.count", None)
    if total is not None and total != len(owner):
        found = f"the {len(shards)} parts have {len(owner)} tensors"
        raise BadGGUF(f"{shards[0].path}: split.tensors.count is {total}, {found}")


class GGUFFile:
    """Metadata and tensors of a model file. A context manager; arrays that were read stay valid after it is closed.

    Metadata values are int, float, bool or str; arrays of numbers and bools are read-only numpy arrays, arrays of strings are
    Strings. Strings that are not UTF-8 (byte tokens in some vocabularies) hold their odd bytes as lone surrogates:
    `s.encode("utf-8", "surrogateescape")` gives the file's bytes. `metadata` is unchecked; `fields` and `hparams` check values.
    """

    def __init__(self, path: Path, shards: tuple[Shard, ...]) -> None:
        self.path = path
        self.paths = tuple(s.path for s in shards)
        self.version = shards[0].version
        self.alignment = shards[0].alignment
        self.n_bytes = sum(s.source.size for s in shards)
        self.metadata: Mapping[str, object] = MappingProxyType(shards[0].metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_numbered(shards))
        self.fields = Fields(self.metadata, f"{path}: ")
        self._sources = [s.source for s in shards]
        self._ahead: ReadAhead | None = None

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GGUFFile {self.path} with {len(self.tensors)} tensors>"

    def close(self) -> None:
        """Close the files. Safe to repeat."""
        self.end_ahead()
        for source in self._sources:
            source.close()

    def read_into(self, name: str, out: np.ndarray, first: int = 0) -> None:
        """Fill `out` [n] uint8 with a tensor's bytes from byte `first` on. Several threads may read at once."""
        info = self._info(name)
        is_inside = 0 <= first <= info.n_bytes - out.size
        assert out.dtype == np.uint8 and is_inside, f"{name}: {first} + {out.size} bytes"
        self._sources[info.shard].read_into(info.offset + first, out)

    def split(self, name: str, parts: Sequence[str], first: int | None = None) -> None:
        """From now on the tensor is several ones, of equal numbers of rows each. first: the rows of the first of two"""
        whole = self._info(name)
        n_row, n_byte = whole.shape[0], whole.n_bytes // whole.shape[0]
        each = n_row // len(parts) if first is None else min(first, n_row)
        made = {
            part: replace(
                whole,
                name=part,
                shape=(n := each if first is None or not i else n_row - each, *whole.shape[1:]),
                offset=whole.offset + i * each * n_byte,
                n_bytes=n * n_byte,
            )
            for i, part in enumerate(parts)
        }
        self.tensors = MappingProxyType({**self.tensors, **made})

    def begin_ahead(self) -> None:
        """Read the tensors ahead on a thread, each into memory of its own, until `end_ahead`."""
        self._ahead = ReadAhead(self.tensors, self.read_into)

    def read_ahead(self, name: str) -> mmap.mmap | None:
        """A tensor's bytes if they were read ahead. Each is given once."""
        return None if self._ahead is None else self._ahead.take(name)

    def end_ahead(self) -> None:
        """Read nothing more ahead, and free what was not asked for. Safe to repeat."""
        if self._ahead is not None:
            self._ahead.close()

    def raw(self, name: str) -> np.ndarray:
        """[n_bytes] uint8: a copy of the tensor's bytes."""
        out = np.empty(self._info(name).n_bytes, np.uint8)
        self.read_into(name, out)
        return out

    def _info(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelError(f"{self.path}: no tensor {quoted(name)}") from None

    @property
    def architecture(self) -> str:
        return self.fields.label("general.architecture")

    @property
    def has_mtp(self) -> bool:
        """True if an MTP block is in the file. Files whose block was removed often keep its metadata key, so the tensors decide."""
        return any(name.endswith(".nextn.eh_proj.weight") for name in self.tensors)

    @property
    def hparams(self) -> Fields:
        """The fields whose names begin with the architecture."""
        return Fields(self.metadata, f"{self.path}: ", f"{self.architecture}.")

    @property
    def n_params(self) -> int:
        """Weights in all tensors."""
        return sum(t.n_elements for t in self.tensors.values())

    @property
    def file_type(self) -> str:
        """Name of `general.file_type`, e.g. "Q4_K_M"; "unknown" if absent."""
        return file_type_name(self.file_type_number)

    @property
    def file_type_number(self) -> int | None:
        """`general.file_type`; None if it is absent or no number: each tensor has its own type."""
        number = self.metadata.get("general.file_type")
        return number if isinstance(number, int) and not isinstance(number, bool) else None


def _numbered(shards: tuple[Shard, ...]) -> dict[str, TensorInfo]:
    """All tensors, each with the number of its part."""
    entries = ((i, k, t) for i, shard in enumerate(shards) for k, t in shard.tensors.items())
    return {k: replace(t, shard=i) if i else t for i, k, t in entries}


def fingerprint(path: Path) -> str:
    """A short name for a model file's contents: a digest of its header, its size and samples of its tensors. Reading tens of gigabytes
    would take minutes, and weights that were trained further differ everywhere."""
    digest = blake2b(digest_size=16)
    with open_gguf(path) as file:
        paths = file.paths
        starts = []
        for i in range(len(paths)):
            offsets = (t.offset for t in file.tensors.values() if t.shard == i)
            starts.append(min(offsets, default=0))
    for part, start in zip(paths, starts, strict=True):
        size = part.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with part.open("rb") as f:
            digest.update(f.read(start))
            for i in range(SAMPLES):
                f.seek(start + max(0, size - start - SAMPLE) * i // (SAMPLES - 1))
                digest.update(f.read(SAMPLE))
    return digest.hexdigest()
