"""Tensors of a file as callables on a device: matrices, embeddings, vectors; and the check that they are all there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.kernels.dequant_ref import dequantize, dequantize_rows
from pyspec.cuda.kernels.linear import linear
from pyspec.cuda.kernels.linear_pack import Packed, repack
from pyspec.cuda.kernels.linear_ref import LinearSpec
from pyspec.errors import BadTensors
from pyspec.gguf import GGMLType, GGUFFile, TensorInfo

PLAIN = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
PROBE_ROWS = 272  # of the matrix a kernel is checked with


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


class Matrix(Protocol):
    """y = x W^T for a weight [out, in]: x [row, in] f32 -> [row, out] f32."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Dense:
    """An unpacked weight [out, in]."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight).float()


class Unpacked:
    """Parts as in the file, unpacked at each use: right everywhere, slow."""

    def __init__(self, parts: Sequence[tuple[Tensor, TensorInfo, float]]) -> None:
        self.parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        weights = [dequantize(raw, info.type, info.shape) * scale for raw, info, scale in self.parts]
        return F.linear(x, torch.cat(weights) if len(weights) > 1 else weights[0])


class Streamed:
    """A weight repacked for the `linear` kernel, which reads it once for up to 128 rows."""

    def __init__(self, packed: Packed, launch: Callable[..., object]) -> None:
        self.packed, self.launch = packed, launch

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], self.packed.n_out, dtype=torch.float32, device=x.device)
        self.launch(x, self.packed, out)
        return out


class Joined:
    """Matrices of one input, their outputs side by side."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self.matrices = matrices

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([m(x) for m in self.matrices], -1)


class Embedding:
    """Rows of a table by token id; only the asked rows are unpacked.

    raw [token, bytes of a row] uint8 of `type`.
    """

    def __init__(self, raw: Tensor, type: GGMLType, scale: float) -> None:
        self.raw, self.type, self.scale = raw, type, scale

    def __call__(self, tokens: Tensor) -> Tensor:
        rows = dequantize_rows(self.raw, self.type, tokens)
        return rows if self.scale == 1.0 else rows * self.scale


class Weights:
    """A file's tensors, brought to a device.

    `dense`: the dtype matrices are unpacked to at load; None keeps them packed, for the kernels on a GPU, or
    unpacked at each use on a CPU (less memory, slow).
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
        if self.dense is not None:
            return Dense(self._dense(names, self.dense))
        if self.device.type != "cuda":
            return Unpacked([(self._raw(n), self._info(n), self._scale(n)) for n in names])
        runs = groupby(names, key=lambda n: (self._streams(n), self._info(n).type if self._streams(n) else None))
        parts = [self._stream(list(run)) if kernel else self._exact(list(run)) for (kernel, _), run in runs]
        return parts[0] if len(parts) == 1 else Joined(parts)

    def _streams(self, name: str) -> bool:
        """Whether the kernel takes this tensor; asked of a small matrix, since the check would unpack a large one."""
        info = self._info(name)
        if len(info.shape) != 2 or info.type in PLAIN or self._scale(name) != 1.0:
            return False
        return (
            linear.chosen(LinearSpec(self.device, info.type, PROBE_ROWS, info.shape[1])).name != linear.reference.name
        )

    def _stream(self, names: Sequence[str]) -> Matrix:
        infos = [self._info(n) for n in names]
        n_out, n_in, kind = sum(i.shape[0] for i in infos), infos[0].shape[1], infos[0].type
        impl = linear.chosen(LinearSpec(self.device, kind, PROBE_ROWS, n_in))
        raw = torch.cat([self._raw(n) for n in names])
        return Streamed(repack(raw, kind, (n_out, n_in)), impl.bind(LinearSpec(self.device, kind, n_out, n_in)))

    def _exact(self, names: Sequence[str]) -> Matrix:
        """Without a kernel: f32 as it is, the rest as bf16."""
        is_f32 = all(self._info(n).type is GGMLType.F32 for n in names)
        return Dense(self._dense(names, torch.float32 if is_f32 else torch.bfloat16))

    def _dense(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        infos = [self._info(n) for n in names]
        whole = torch.empty(sum(i.shape[0] for i in infos), infos[0].shape[-1], dtype=dtype, device=self.device)
        at = 0
        for n, i in zip(names, infos, strict=True):
            part = dequantize(self._raw(n), i.type, i.shape)
            whole[at : at + i.shape[0]] = part if (s := self._scale(n)) == 1.0 else part * s
            at += i.shape[0]
        return whole

    def embedding(self, name: str) -> Embedding:
        info = self._info(name)
        return Embedding(self._raw(name).view(info.shape[0], -1), info.type, self._scale(name))

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
