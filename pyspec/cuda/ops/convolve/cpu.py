"""`convolve` on CPUs (cpu/native/convolve.cpp)."""

from __future__ import annotations

from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.convolve.ref import ConvolveSpec, Given, check_args

_RUN = CpuKernel("pyspec_convolve", "11q")


class CpuConvolve:
    """Implements `Convolve`."""

    def __init__(self, spec: ConvolveSpec) -> None:
        self.spec = spec

    def __call__(self, *args: *Given) -> Tensor:
        check_args(self.spec, *args)
        x, given, base, row_seq, side, residual = args
        s, n_row = self.spec, len(x)
        out, own = empty(n_row, s.n), given[:, side * s.n_tap * s.n_group :]
        sizes = n_row, s.n, s.n_tap, s.group, given.shape[1]
        _RUN(x, own, base[side], residual, out, row_seq, *sizes)
        return out


bind = CpuConvolve
