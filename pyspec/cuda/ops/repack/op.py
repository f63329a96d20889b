"""`repack`: matrices as in the file into the records that products stream, while others run."""

from __future__ import annotations

from pyspec.cuda.op import Impl, Op, implemented
from pyspec.cuda.ops.linear.ref import USUAL_TYPES
from pyspec.cuda.ops.repack import cuda, ref

repack: Op[ref.RepackSpec, ref.Repack] = Op(
    "repack",
    Impl("torch", ref.bind),
    implemented(cuda, capturable=False),
    ref.check,
    shapes=lambda device: [ref.RepackSpec(device, type) for type in USUAL_TYPES],  # The usual types
)
