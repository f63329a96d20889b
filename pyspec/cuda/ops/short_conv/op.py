"""`short_conv`: move the window behind the last verify, then run this forward's rows (LFM2)."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.short_conv import cpu as short_conv_cpu
from pyspec.cuda.ops.short_conv import cuda as short_conv_cuda
from pyspec.cuda.ops.short_conv import ref as short_conv_ref
from pyspec.cuda.ops.short_conv import triton as short_conv_triton
from pyspec.cuda.ops.short_conv.shape import ShortConvShape


def shapes(device: torch.device) -> list[short_conv_ref.ShortConvSpec]:
    """LFM2 of 1.2 B and of 8 B."""
    return [short_conv_ref.ShortConvSpec(device, ShortConvShape(2048, 3))]


short_conv: Op[short_conv_ref.ShortConvSpec, short_conv_ref.ShortConv] = Op(
    "short_conv",
    Impl("torch", short_conv_ref.bind),
    [
        Impl(
            "cuda",
            short_conv_cuda.bind,
            short_conv_cuda.limits,
            capturable=True,
            programs=short_conv_cuda.programs,
        ),
        Impl("triton", short_conv_triton.bind, short_conv_triton.limits, capturable=True),
        Impl("cpu", short_conv_cpu.bind, short_conv_cpu.limits, capturable=True),
    ],
    short_conv_ref.check,
    guard=short_conv_ref.GUARD,
    shapes=shapes,
    in_prompts=False,
)
