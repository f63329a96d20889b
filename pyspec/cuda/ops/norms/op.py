"""`norms`: norms of rows that stay f32, alone, with some rows once more, or of two inputs side by side."""

from __future__ import annotations

from pyspec.cuda.op import Impl, Op, implemented
from pyspec.cuda.ops.norms import cpu, cuda, ref, triton

norms: Op[ref.NormsSpec, ref.Norms] = Op(
    "norms",
    Impl("torch", ref.bind, capturable=True),
    implemented(cuda, triton, cpu),
    cuda.check,
    guard=ref.GUARD,
    shapes=lambda device: [ref.NormsSpec(device, 5120, 1e-6)],  # 27B
)
