"""`convolve` on CPUs (cpu/native/convolve.cpp)."""

from __future__ import annotations

from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.convolve.ref import Convolve, ConvolveSpec, Given, check_args

_RUN = CpuKernel("pyspec_convolve", "11q")


def bind(spec: ConvolveSpec) -> Convolve:
    def convolve(*args: *Given) -> Tensor:
        check_args(spec, *args)
        x, given, base, row_seq, side, residual = args
        out, own = empty(len(x), spec.n), given[:, side * spec.n_tap * spec.n_group :]
        sizes = len(x), spec.n, spec.n_tap, spec.group, given.shape[1]
        _RUN(x, own, base[side], residual, out, row_seq, *sizes)
        return out

    return convolve
