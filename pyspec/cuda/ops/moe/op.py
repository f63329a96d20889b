"""`moe`: rows through the experts they chose."""

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.moe import cuda as moe_cuda
from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe import triton as moe_triton

moe: Op[moe_ref.MoeSpec, moe_ref.Moe] = Op(
    "moe",
    Impl("torch", moe_ref.bind),
    [
        Impl("cuda", moe_cuda.bind, moe_cuda.limits, capturable=True),
        Impl("triton", moe_triton.bind, moe_triton.limits, capturable=True),
    ],
    moe_cuda.check,
)
