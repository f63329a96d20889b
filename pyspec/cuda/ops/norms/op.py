"""`norms`: norms of rows that stay f32, alone, with some rows once more, or of two inputs side by side."""

from __future__ import annotations

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.norms import cpu, cuda, ref, triton

norms: Op[ref.NormsSpec, ref.Norms] = declared(
    ref,
    cuda,
    triton,
    cpu,
    shapes=lambda device: [ref.NormsSpec(device, 5120, 1e-6)],  # 27B
    capturable=True,
)
