"""`rope_tail` on CPUs (cpu/native/rope_tail.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.rope_tail.ref import RopeTail, RopeTailSpec

_RUN = CpuKernel("pyspec_rope_tail", "5q" + "6q" + "2d")


def bind(spec: RopeTailSpec) -> RopeTail:
    def run(
        x: Tensor, positions: Tensor, freq: Tensor, weight: Tensor | None = None, sign: float = 1.0
    ) -> Tensor:
        n_row, n_head, dim = x.shape
        assert dim == spec.dim and x.dtype == torch.float32
        assert x.stride(2) == 1 and (n_head == 1 or x.stride(1) == dim)
        assert freq.dtype == torch.float64 and positions.dtype == torch.int64
        out = empty(n_row, n_head, dim)
        sizes = n_row, x.stride(0), n_head, dim, 2 * len(freq), int(spec.normed)
        _RUN(x, positions, freq, weight, out, *sizes, spec.eps, sign)
        return out

    return run
