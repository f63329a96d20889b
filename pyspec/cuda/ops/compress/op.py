"""`compress`: rows that stand for several tokens."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.compress import cuda as compress_cuda
from pyspec.cuda.ops.compress import ref as compress_ref
from pyspec.cuda.ops.compress.cases import check


def shapes(device: torch.device) -> list[compress_ref.CompressSpec]:
    """Both of DeepSeek-V4-Flash."""
    half = torch.float16
    return [
        compress_ref.CompressSpec(device, 4, 512, True, 64, 1e-6, half),
        compress_ref.CompressSpec(device, 128, 512, False, 64, 1e-6, half),
    ]


compress: Op[compress_ref.CompressSpec, compress_ref.Compress] = Op(
    "compress",
    Impl("torch", compress_ref.bind),
    [
        Impl(
            "cuda",
            compress_cuda.bind,
            compress_cuda.limits,
            capturable=True,
            programs=compress_cuda.programs,
        )
    ],
    check,
    guard=compress_ref.GUARD,
    shapes=shapes,
)
