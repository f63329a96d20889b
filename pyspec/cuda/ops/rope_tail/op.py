"""`rope_tail`: rope on the last dims of heads, after an optional norm."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.rope_tail import cuda as tail_cuda
from pyspec.cuda.ops.rope_tail import ref as tail_ref


def shapes(device: torch.device) -> list[tail_ref.RopeTailSpec]:
    """DeepSeek-V4-Flash."""
    return [tail_ref.RopeTailSpec(device, 512, 64, True, 1e-6)]


rope_tail: Op[tail_ref.RopeTailSpec, tail_ref.RopeTail] = Op(
    "rope_tail",
    Impl("torch", tail_ref.bind, capturable=True),
    [Impl("cuda", tail_cuda.bind, tail_cuda.limits, capturable=True, programs=tail_cuda.programs)],
    tail_cuda.check,
    shapes=shapes,
)
