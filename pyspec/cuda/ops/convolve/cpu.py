"""`convolve` on CPUs (cpu/native/convolve.cpp)."""

from __future__ import annotations

from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty, missing
from pyspec.cuda.ops.convolve.ref import Convolve, ConvolveSpec, check_args

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
        check_args(s, x, given, base, row_seq, residual)
        out, own = empty(n_row, s.n), given[:, side * s.n_tap * s.n_group :]
        sizes = n_row, s.n, s.n_tap, s.group, given.shape[1]
        _RUN(x, own, base[side], residual, out, row_seq, *sizes)
        return out


def bind(spec: ConvolveSpec) -> Convolve:
    return CpuConvolve(spec)
