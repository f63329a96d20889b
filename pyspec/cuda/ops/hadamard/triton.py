"""`hadamard` in Triton: one launch, a program a head (triton_kernels.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import tri
from pyspec.cuda.ops.hadamard.ref import Hadamard, HadamardSpec

MAX_DIM = 1024


def limits(spec: HadamardSpec) -> str | None:
    if (why := tri.missing(spec.device)) is not None:
        return why
    if spec.dim > MAX_DIM:
        return f"heads are {spec.dim} wide; the kernel takes up to {MAX_DIM}"
    return None


def bind(spec: HadamardSpec) -> Hadamard:
    constants = {"N": spec.n, "FACTOR": spec.n**-0.5}

    def hadamard(x: Tensor) -> Tensor:
        from pyspec.cuda.ops.hadamard import triton_kernels as kernels

        assert x.dtype == torch.float32 and x.is_contiguous() and x.shape[-1] == spec.dim
        out = torch.empty_like(x)
        if n_piece := x.numel() // spec.n:
            tri.launch(kernels.hadamard, (n_piece,), (x, out), constants, 1)
        return out

    return hadamard
