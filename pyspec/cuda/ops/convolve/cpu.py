"""`convolve` on CPUs (cpu/native/convolve.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty, missing
from pyspec.cuda.ops.convolve.ref import Convolve, ConvolveSpec

_RUN = CpuKernel("pyspec_convolve", "11q")


def limits(spec: ConvolveSpec) -> str | None:
    return missing() if spec.device.type == "cpu" else "runs on CPUs only"


class CpuConvolve:
    """Implements `Convolve`."""

    def __init__(self, spec: ConvolveSpec) -> None:
        self.spec = spec

    def __call__(
        self,
        x: Tensor,
        given: Tensor,
        base: Tensor,
        row_seq: Tensor,
        side: int,
        residual: Tensor | None = None,
    ) -> Tensor:
        s, n_row = self.spec, len(x)
        assert x.shape == (n_row, s.n) and given.shape == (n_row, 2 * s.n_tap * s.n_group)
        assert all(t.is_contiguous() and t.dtype == torch.float32 for t in (x, given, base))
        assert len(row_seq) == n_row and row_seq.dtype == torch.int32
        assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
        out, own = empty(n_row, s.n), given[:, side * s.n_tap * s.n_group :]
        sizes = n_row, s.n, s.n_tap, s.group, given.shape[1]
        _RUN(x, own, base[side], residual, out, row_seq, *sizes)
        return out


def bind(spec: ConvolveSpec) -> Convolve:
    return CpuConvolve(spec)
