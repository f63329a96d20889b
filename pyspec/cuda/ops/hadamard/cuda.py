"""`hadamard` on NVIDIA GPUs: one launch, a warp a head (hadamard.cu)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda import jit
from pyspec.cuda.context import per_device
from pyspec.cuda.ops.hadamard.ref import Hadamard, HadamardSpec

WARPS = 4
MAX_DIM = 1024
ARGS = "pp" + "i"


def limits(spec: HadamardSpec) -> str | None:
    if (why := jit.missing(spec.device)) is not None:
        return why
    if spec.dim % 32 or spec.dim > MAX_DIM:
        return f"heads are {spec.dim} wide; the kernel takes multiples of 32 up to {MAX_DIM}"
    return None


def defines(spec: HadamardSpec) -> dict[str, int | str]:
    """Macros of hadamard.cu."""
    return {"DIM": spec.dim, "TURNED": spec.n}


@per_device
def _kernel(device: torch.device, spec: HadamardSpec) -> jit.Kernel:
    arch = jit.arch_of(torch.cuda.get_device_capability(device))
    return jit.compile_cubin("hadamard", arch, defines(spec)).kernel("hadamard", ARGS)


def programs(spec: HadamardSpec, target: jit.GpuKind) -> list[jit.Program]:
    return [target.program("hadamard", defines(spec))]


def bind(spec: HadamardSpec) -> Hadamard:
    overlap = torch.cuda.get_device_capability(spec.device) >= (9, 0)
    kernel = _kernel(spec.device, spec)

    def hadamard(x: Tensor) -> Tensor:
        assert x.dtype == torch.float32 and x.is_contiguous() and x.shape[-1] == spec.dim
        out = torch.empty_like(x)
        if n_head := x.numel() // spec.dim:
            grid = (-(-n_head // WARPS),)
            kernel.launch(grid, 32 * WARPS, (x, out, np.int32(n_head)), overlap=overlap)
        return out

    return hadamard
