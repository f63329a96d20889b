"""`angles` on CPUs (cpu/native/embed.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.angles.ref import Angles, AnglesSpec

_RUN = CpuKernel("pyspec_angles", "6qd")


def angles(positions: Tensor, freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    n_row, n = positions.shape[0], freq.shape[0]
    assert positions.dtype == torch.int64 and positions.is_contiguous()
    assert freq.dtype == torch.float32 and freq.is_contiguous()
    cos, sin = empty(n_row, 1, n), empty(n_row, 1, n)
    _RUN(positions, freq, cos, sin, n_row, n, factor)
    return cos, sin


def bind(spec: AnglesSpec) -> Angles:
    return angles
