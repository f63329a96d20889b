"""`streams`: hyper-connections around the parts of a block."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.streams import cuda as streams_cuda
from pyspec.cuda.ops.streams import ref as streams_ref


def shapes(device: torch.device) -> list[streams_ref.StreamsSpec]:
    """DeepSeek-V4-Flash."""
    return [streams_ref.StreamsSpec(device, 4, 4096, 20, 1e-6, 1e-6)]


streams: Op[streams_ref.StreamsSpec, streams_ref.Streams] = Op(
    "streams",
    Impl("torch", streams_ref.TorchStreams),
    [
        Impl(
            "cuda",
            streams_cuda.bind,
            streams_cuda.limits,
            capturable=True,
            programs=streams_cuda.programs,
        )
    ],
    streams_cuda.check,
    shapes=shapes,
)
