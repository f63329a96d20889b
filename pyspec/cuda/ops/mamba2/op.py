"""`mamba2`: fold the last verify into the state, then run this forward's rows (Mamba-2)."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.mamba2 import cpu as mamba2_cpu
from pyspec.cuda.ops.mamba2 import cuda as mamba2_cuda
from pyspec.cuda.ops.mamba2 import ref as mamba2_ref
from pyspec.cuda.ops.mamba2 import triton as mamba2_triton
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape


def shapes(device: torch.device) -> list[mamba2_ref.Mamba2Spec]:
    """Nemotron 3 Super."""
    shape = Mamba2Shape(n_head=128, head_dim=64, n_group=8, n_state=128, n_conv=4)
    return [mamba2_ref.Mamba2Spec(device, shape)]


mamba2: Op[mamba2_ref.Mamba2Spec, mamba2_ref.Mamba2] = Op(
    "mamba2",
    Impl("torch", mamba2_ref.bind),
    [
        Impl(
            "cuda", mamba2_cuda.bind, mamba2_cuda.limits, capturable=True, programs=mamba2_cuda.programs
        ),
        Impl("triton", mamba2_triton.bind, mamba2_triton.limits, capturable=True),
        Impl("cpu", mamba2_cpu.bind, mamba2_cpu.limits, capturable=True),
    ],
    mamba2_ref.check,
    guard=mamba2_ref.GUARD,
    shapes=shapes,
    in_prompts=False,
)
