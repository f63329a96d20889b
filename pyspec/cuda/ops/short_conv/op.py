"""`short_conv`: move the window behind the last verify, then run this forward's rows (LFM2)."""

from __future__ import annotations

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.short_conv import cpu, cuda, ref, triton
from pyspec.cuda.ops.short_conv.shape import ShortConvShape

short_conv: Op[ref.ShortConvSpec, ref.ShortConv] = declared(
    ref,
    cuda,
    triton,
    cpu,
    # LFM2 of 1.2 B and of 8 B
    shapes=lambda device: [ref.ShortConvSpec(device, ShortConvShape(2048, 3))],
    in_prompts=False,
)
