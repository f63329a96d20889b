"""Tensors of a file as callables on a device: matrices, embeddings, vectors; and the check that they are all there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.kernels.dequant_ref import dequantize, dequantize_rows
from pyspec.errors import BadTensors
from pyspec.gguf import GGUFFile, TensorInfo


@dataclass(frozen=True, slots=True)
class Want:
    """A tensor an architecture needs: torch shape (slowest first); several shapes if writers differ."""

    shape: tuple[int, ...]
    optional: bool = False
    also: tuple[tuple[int, ...], ...] = ()


def check_tensors(file: GGUFFile, wants: Mapping[str, Want], alias: Mapping[str, str] | None = None) -> None:
    """Raise BadTensors that lists every missing and every misshaped tensor at once.

    `alias` maps the names in `wants` to those of the file, for writers that use other names.
    """
    bad = []
    for name, want in wants.items():
        info = file.tensors.get((alias or {}).get(name, name))
        if info is None:
            if not want.optional:
                bad.append(f"{name}: missing, want {list(want.shape)}")
        elif info.shape != want.shape and info.shape not in want.also:
            bad.append(f"{name}: want {list(want.shape)}, file has {list(info.shape)}")
    if bad:
        raise BadTensors(f"{len(bad)} tensors do not fit {file.architecture}: " + "; ".join(bad))


class Matrix:
    """y = x W^T for a weight [out, in]: dense, or packed as in the file and unpacked at each use.

    x [row, in] f32 -> [row, out] f32.
    """

    def __init__(
        self, dense: Tensor | None, packed: Sequence[tuple[Tensor, TensorInfo, float]], parts: Sequence[int], n_in: int
    ) -> None:
        self.dense, self.packed, self.parts = dense, packed, parts
        self.shape = (sum(parts), n_in)

    def part(self, first: int) -> Matrix:
        """The parts from number `first` on, as a matrix of its own that shares the memory."""
        dense = None if self.dense is None else self.dense[sum(self.parts[:first]) :]
        return Matrix(dense, self.packed[first:], self.parts[first:], self.shape[1])

    def weight(self) -> Tensor:
        """[out, in] dense."""
        if self.dense is not None:
            return self.dense
        parts = [dequantize(raw, info.type, info.shape) * scale for raw, info, scale in self.packed]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def __call__(self, x: Tensor) -> Tensor:
        w = self.weight()
        return F.linear(x.to(w.dtype), w).float()

    @property
    def n_bytes(self) -> int:
        if self.dense is not None:
            return self.dense.numel() * self.dense.element_size()
        return sum(raw.numel() for raw, _, _ in self.packed)


class Embedding:
    """Rows of a table by token id; a packed table is unpacked for the asked rows only."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix

    def __call__(self, tokens: Tensor) -> Tensor:
        m = self.matrix
        if m.dense is not None:
            return m.dense[tokens].float()
        raw, info, scale = m.packed[0]
        return dequantize_rows(raw.view(m.shape[0], -1), info.type, tokens) * scale


class Weights:
    """A file's tensors, brought to a device.

    `dense`: the dtype matrices are unpacked to at load; None keeps them packed (less memory, slower without kernels).
    """

    def __init__(
        self, file: GGUFFile, device: torch.device, dense: torch.dtype | None, alias: Mapping[str, str] | None = None
    ) -> None:
        self.file, self.device, self.dense, self.alias = file, device, dense, alias or {}
        self._shared: dict[tuple[str, ...], Matrix] = {}

    def _info(self, name: str) -> TensorInfo:
        return self.file.tensors[self.alias.get(name, name)]

    def has(self, name: str) -> bool:
        return self.alias.get(name, name) in self.file.tensors

    def _raw(self, name: str) -> Tensor:
        # the mmap is read-only, and torch warns about sharing read-only memory: a copy is wanted anyway
        raw = torch.from_numpy(self.file.raw(self.alias.get(name, name)).copy())
        return raw.to(self.device)

    def _scale(self, name: str) -> float:
        """NVFP4's second-level scale, a sidecar tensor that multiplies the product."""
        side = name.removesuffix(".weight") + ".scale"
        return float(self.vector(side).item()) if self.has(side) else 1.0

    def matrix(self, *names: str) -> Matrix:
        """One matrix, or several with the same input side by side along their outputs."""
        if names not in self._shared:
            self._shared[names] = self._load(names)
        return self._shared[names]

    def _load(self, names: Sequence[str]) -> Matrix:
        infos = [self._info(n) for n in names]
        parts, n_in = [i.shape[0] for i in infos], infos[0].shape[-1]
        if self.dense is None:
            packed = [(self._raw(n), i, self._scale(n)) for n, i in zip(names, infos, strict=True)]
            return Matrix(None, packed, parts, n_in)
        whole = torch.empty(sum(parts), n_in, dtype=self.dense, device=self.device)
        at = 0
        for n, i in zip(names, infos, strict=True):
            part = dequantize(self._raw(n), i.type, i.shape)
            whole[at : at + i.shape[0]] = part if (s := self._scale(n)) == 1.0 else part * s
            at += i.shape[0]
        return Matrix(whole, (), parts, n_in)

    def embedding(self, name: str) -> Embedding:
        return Embedding(self.matrix(name))

    def vector(self, name: str) -> Tensor:
        """A small tensor in f32, shape as in the file."""
        info = self._info(name)
        return dequantize(self._raw(name), info.type, info.shape).float()

    def optional(self, name: str) -> Tensor | None:
        return self.vector(name) if self.has(name) else None


def weight_bytes(file: GGUFFile, dense: torch.dtype | None) -> int:
    """Bytes the file's tensors take on the device; the basis of the memory plan."""
    size = 0 if dense is None else torch.empty((), dtype=dense).element_size()
    big = [t for t in file.tensors.values() if len(t.shape) > 1]
    small = sum(4 * t.n_elements for t in file.tensors.values() if len(t.shape) == 1)
    return small + sum(t.n_bytes if size == 0 else size * t.n_elements for t in big)
