"""`angles`: cos and sin of the rope for the rows of a batch."""

from __future__ import annotations

from pyspec.cuda.op import Impl, Op, implemented
from pyspec.cuda.ops.angles import cpu, cuda, ref

angles: Op[ref.AnglesSpec, ref.Angles] = Op(
    "angles",
    Impl("torch", ref.bind, capturable=True),
    implemented(cuda, cpu),
    cuda.check,
    shapes=lambda device: [ref.AnglesSpec(device)],
)
