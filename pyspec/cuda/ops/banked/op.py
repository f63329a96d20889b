"""`banked`: a row of a stream mixed with rows that were kept of it."""

from __future__ import annotations

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.banked import cpu, cuda, ref

banked: Op[ref.BankedSpec, ref.Banked] = declared(
    ref,
    cuda,
    cpu,
    shapes=lambda device: [ref.BankedSpec(device, 7168, n, 1e-5) for n in (1, 8)],  # Kimi K3's width
    capturable=True,
)
