"""`ahead`: inputs of a round that is launched before the host has read the previous one."""

from __future__ import annotations

from pyspec.cuda.op import Impl, Op, implemented
from pyspec.cuda.ops.ahead import cpu, cuda, ref, triton

ahead: Op[ref.AheadSpec, ref.Ahead] = Op(
    "ahead",
    Impl("torch", ref.bind, capturable=True),
    implemented(cuda, triton, cpu),
    cuda.check,
    guard=ref.GUARD,
    shapes=lambda device: [ref.AheadSpec(device)],
)
