"""`convolve`: the rows of DFlash2's blocks, mixed with the rows before them."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.convolve import cpu as convolve_cpu
from pyspec.cuda.ops.convolve import cuda as convolve_cuda
from pyspec.cuda.ops.convolve import ref as convolve_ref


def shapes(device: torch.device) -> list[convolve_ref.ConvolveSpec]:
    """27B's drafter."""
    return [convolve_ref.ConvolveSpec(device, 5120, 2, 16)]


convolve: Op[convolve_ref.ConvolveSpec, convolve_ref.Convolve] = Op(
    "convolve",
    Impl("torch", convolve_ref.bind, capturable=True),
    [
        Impl(
            "cuda",
            convolve_cuda.bind,
            convolve_cuda.limits,
            capturable=True,
            programs=convolve_cuda.programs,
        ),
        Impl("cpu", convolve_cpu.bind, convolve_cpu.limits, capturable=True),
    ],
    convolve_cuda.check,
    shapes=shapes,
)
