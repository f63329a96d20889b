"""`ahead`: inputs of a round that is launched before the host has read the previous one."""

from __future__ import annotations

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.ahead import cpu, cuda, ref, triton

ahead: Op[ref.AheadSpec, ref.Ahead] = declared(
    ref, cuda, triton, cpu, shapes=lambda device: [ref.AheadSpec(device)], capturable=True
)
