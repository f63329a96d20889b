"""`hadamard` on CPUs (cpu/native/hadamard.cpp): heads of all rows shared by the threads."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.hadamard.ref import Hadamard, HadamardSpec

_RUN = CpuKernel("pyspec_hadamard", "2q" + "3q")


def limits(spec: HadamardSpec) -> str | None:
    if spec.n < 8:
        return f"{spec.n} dims are turned together; the kernel takes 8 or more"
    return None


def bind(spec: HadamardSpec) -> Hadamard:
    def hadamard(x: Tensor) -> Tensor:
        assert x.dtype == torch.float32 and x.is_contiguous() and x.shape[-1] == spec.dim
        out = empty(*x.shape)
        _RUN(x, out, x.numel() // spec.dim, spec.dim, spec.n)
        return out

    return hadamard
