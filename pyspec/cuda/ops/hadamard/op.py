"""`hadamard`: sums of turned values are turned back."""

from __future__ import annotations

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.hadamard import cpu, cuda, ref

hadamard: Op[ref.HadamardSpec, ref.Hadamard] = declared(
    ref,
    cuda,
    cpu,
    # Heads of 27B, and odd ones
    shapes=lambda device: [ref.HadamardSpec(device, *of) for of in ((256, 256), (96, 32))],
    capturable=True,
)
