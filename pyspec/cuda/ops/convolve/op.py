"""`convolve`: the rows of DFlash2's blocks, mixed with the rows before them."""

from __future__ import annotations

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.convolve import cpu, cuda, ref

convolve: Op[ref.ConvolveSpec, ref.Convolve] = declared(
    ref,
    cuda,
    cpu,
    shapes=lambda device: [ref.ConvolveSpec(device, 5120, 2, 16)],  # 27B's drafter
    capturable=True,
)
