"""`streams`: hyper-connections around the parts of a block."""

from __future__ import annotations

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.streams import cuda, ref

streams: Op[ref.StreamsSpec, ref.Streams] = declared(
    ref,
    cuda,
    shapes=lambda device: [ref.StreamsSpec(device, 4, 4096, 20, 1e-6, 1e-6)],  # DeepSeek-V4-Flash
)
