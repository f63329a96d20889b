"""`angles`: cos and sin of the rope for the rows of a batch."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.angles import cpu as angles_cpu
from pyspec.cuda.ops.angles import cuda as angles_cuda
from pyspec.cuda.ops.angles import ref as angles_ref


def shapes(device: torch.device) -> list[angles_ref.AnglesSpec]:
    return [angles_ref.AnglesSpec(device)]


angles: Op[angles_ref.AnglesSpec, angles_ref.Angles] = Op(
    "angles",
    Impl("torch", angles_ref.bind, capturable=True),
    [
        Impl(
            "cuda", angles_cuda.bind, angles_cuda.limits, capturable=True, programs=angles_cuda.programs
        ),
        Impl("cpu", angles_cpu.bind, angles_cpu.limits, capturable=True),
    ],
    angles_cuda.check,
    shapes=shapes,
)
