"""`angles`: cos and sin of the rope for the rows of a batch."""

from __future__ import annotations

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.angles import cpu, cuda, ref

angles: Op[ref.AnglesSpec, ref.Angles] = declared(
    ref, cuda, cpu, shapes=lambda device: [ref.AnglesSpec(device)], capturable=True
)
