"""`gated_streams`: residual streams that are read and written by gates of low rank."""

from __future__ import annotations

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.gated_streams import cpu, cuda, ref

gated_streams: Op[ref.GatedStreamsSpec, ref.GatedStreams] = declared(
    ref,
    cuda,
    cpu,
    shapes=lambda device: [ref.GatedStreamsSpec(device, 4, 2560, 1e-6)],  # Qwen3.8-Flash-Next
)
