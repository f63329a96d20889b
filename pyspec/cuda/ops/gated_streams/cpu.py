"""`gated_streams` on CPUs (cpu/native/gated_streams.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.gated_streams.ref import GatedStreams

_NORM = CpuKernel("pyspec_streams_norm", "6qd")
_BEND = CpuKernel("pyspec_streams_bend", "6q")
_READ = CpuKernel("pyspec_streams_read", "6q")
_MERGE = CpuKernel("pyspec_streams_merge", "8q")


class CpuGatedStreams(GatedStreams):
    """Of one spec."""

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.spec.n_stream, self.spec.n

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        self._check(x, weight[None])
        out = empty(*x.shape)
        _NORM(x, weight, out, len(x), *self._sizes, self.spec.eps)
        return out

    def bend(self, low: Tensor) -> Tensor:
        assert low.dtype == torch.float32 and low.stride(1) == 1
        out = empty(*low.shape)
        _BEND(low, out, *low.shape, low.stride(0), self.spec.n_stream)
        return out

    def read(self, normed: Tensor, gates: Tensor) -> Tensor:
        self._check(normed, gates)
        out = empty(len(normed), self.spec.n)
        _READ(normed, gates, out, len(normed), *self._sizes)
        return out

    def merge(self, x: Tensor, y: Tensor, inject: Tensor) -> Tensor:
        self._check(x)
        out = empty(*x.shape)
        assert y.shape == (len(x), self.spec.n) and y.is_contiguous() and y.dtype == torch.float32
        assert inject.shape == (len(x), self.spec.n_stream) and inject.stride(1) == 1
        _MERGE(x, y, inject, out, len(x), *self._sizes, inject.stride(0))
        return out

    def _check(self, *rows: Tensor) -> None:
        wide = self.spec.n_stream * self.spec.n
        for x in rows:
            assert x.shape[1:] == (wide,) and x.is_contiguous() and x.dtype == torch.float32


bind = CpuGatedStreams
