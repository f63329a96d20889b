"""`compress`: rows that stand for several tokens."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.compress import cpu, cuda, ref
from pyspec.cuda.ops.compress.cases import check


def shapes(device: torch.device) -> list[ref.CompressSpec]:
    """Both of DeepSeek-V4-Flash."""
    half = torch.float16
    return [
        ref.CompressSpec(device, 4, 512, True, 64, 1e-6, half),
        ref.CompressSpec(device, 128, 512, False, 64, 1e-6, half),
    ]


compress: Op[ref.CompressSpec, ref.Compress] = declared(ref, cuda, cpu, check=check, shapes=shapes)
