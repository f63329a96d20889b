"""`ahead`: inputs of a round that is launched before the host has read the previous one."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.ahead import cpu as ahead_cpu
from pyspec.cuda.ops.ahead import cuda as ahead_cuda
from pyspec.cuda.ops.ahead import ref as ahead_ref
from pyspec.cuda.ops.ahead import triton as ahead_triton


def shapes(device: torch.device) -> list[ahead_ref.AheadSpec]:
    return [ahead_ref.AheadSpec(device)]


ahead: Op[ahead_ref.AheadSpec, ahead_ref.Ahead] = Op(
    "ahead",
    Impl("torch", ahead_ref.bind, capturable=True),
    [
        Impl("cuda", ahead_cuda.bind, ahead_cuda.limits, capturable=True, programs=ahead_cuda.programs),
        Impl("triton", ahead_triton.bind, ahead_triton.limits, capturable=True),
        Impl("cpu", ahead_cpu.bind, ahead_cpu.limits, capturable=True),
    ],
    ahead_cuda.check,
    guard=ahead_ref.GUARD,
    shapes=shapes,
)
