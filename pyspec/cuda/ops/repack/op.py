"""`repack`: matrices as in the file into the records that products stream, while others run."""

from __future__ import annotations

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.linear.ref import USUAL_TYPES
from pyspec.cuda.ops.repack import cuda, ref

repack: Op[ref.RepackSpec, ref.Repack] = declared(
    ref, cuda, shapes=lambda device: [ref.RepackSpec(device, type) for type in USUAL_TYPES]
)
