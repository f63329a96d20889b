"""`hadamard`: sums of turned values are turned back."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.hadamard import cpu as hadamard_cpu
from pyspec.cuda.ops.hadamard import cuda as hadamard_cuda
from pyspec.cuda.ops.hadamard import ref as hadamard_ref


def shapes(device: torch.device) -> list[hadamard_ref.HadamardSpec]:
    """Heads of 27B, and odd ones."""
    return [hadamard_ref.HadamardSpec(device, *of) for of in ((256, 256), (96, 32))]


hadamard: Op[hadamard_ref.HadamardSpec, hadamard_ref.Hadamard] = Op(
    "hadamard",
    Impl("torch", hadamard_ref.bind, capturable=True),
    [
        Impl(
            "cuda",
            hadamard_cuda.bind,
            hadamard_cuda.limits,
            capturable=True,
            programs=hadamard_cuda.programs,
        ),
        Impl("cpu", hadamard_cpu.bind, hadamard_cpu.limits, capturable=True),
    ],
    hadamard_ref.check,
    shapes=shapes,
)
