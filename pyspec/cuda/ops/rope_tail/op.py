"""`rope_tail`: rope on the last dims of heads, after an optional norm."""

from __future__ import annotations

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.rope_tail import cpu, cuda, ref

rope_tail: Op[ref.RopeTailSpec, ref.RopeTail] = declared(
    ref,
    cuda,
    cpu,
    shapes=lambda device: [ref.RopeTailSpec(device, 512, 64, True, 1e-6)],  # DeepSeek-V4-Flash
    capturable=True,
)
