"""`convolve`: the rows of DFlash2's blocks, mixed with the rows before them."""

from __future__ import annotations

from pyspec.cuda.op import Impl, Op, implemented
from pyspec.cuda.ops.convolve import cpu, cuda, ref

convolve: Op[ref.ConvolveSpec, ref.Convolve] = Op(
    "convolve",
    Impl("torch", ref.bind, capturable=True),
    implemented(cuda, cpu),
    cuda.check,
    shapes=lambda device: [ref.ConvolveSpec(device, 5120, 2, 16)],  # 27B's drafter
)
