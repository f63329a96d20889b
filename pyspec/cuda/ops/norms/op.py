"""`norms`: norms of rows that stay f32, alone, with some rows once more, or of two inputs side by side."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.norms import cpu as norms_cpu
from pyspec.cuda.ops.norms import cuda as norms_cuda
from pyspec.cuda.ops.norms import ref as norms_ref
from pyspec.cuda.ops.norms import triton as norms_triton


def shapes(device: torch.device) -> list[norms_ref.NormsSpec]:
    """27B."""
    return [norms_ref.NormsSpec(device, 5120, 1e-6)]


norms: Op[norms_ref.NormsSpec, norms_ref.Norms] = Op(
    "norms",
    Impl("torch", norms_ref.bind, capturable=True),
    [
        Impl("cuda", norms_cuda.bind, norms_cuda.limits, capturable=True, programs=norms_cuda.programs),
        Impl("triton", norms_triton.bind, norms_triton.limits, capturable=True),
        Impl("cpu", norms_cpu.bind, norms_cpu.limits, capturable=True),
    ],
    norms_cuda.check,
    guard=norms_ref.GUARD,
    shapes=shapes,
)
