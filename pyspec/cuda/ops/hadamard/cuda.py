"""`hadamard` on NVIDIA GPUs: one launch, a warp a head (hadamard.cu)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import jit
from pyspec.cuda.ops.hadamard.ref import Hadamard, HadamardSpec

WARPS = 4
MAX_DIM = 1024


def limits(spec: HadamardSpec) -> str | None:
    if spec.dim % 32 or spec.dim > MAX_DIM:
        return f"heads are {spec.dim} wide; the kernel takes multiples of 32 up to {MAX_DIM}"
    return None


FILE = jit.KernelFile[HadamardSpec]("hadamard", "ppi", lambda spec: {"DIM": spec.dim, "TURNED": spec.n})


def bind(spec: HadamardSpec) -> Hadamard:
    kernel = FILE.kernel(spec.device, spec)

    def hadamard(x: Tensor) -> Tensor:
        assert x.dtype == torch.float32 and x.is_contiguous() and x.shape[-1] == spec.dim
        out = torch.empty_like(x)
        if n_head := x.numel() // spec.dim:
            kernel.launch((-(-n_head // WARPS),), 32 * WARPS, (x, out, n_head), overlap=True)
        return out

    return hadamard
