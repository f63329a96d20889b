"""`moe`: rows through the experts they chose."""

from pyspec.cuda.kernels import moe_cuda, moe_ref
from pyspec.cuda.op import Impl, Op

moe: Op[moe_ref.MoeSpec] = Op(
    "moe",
    Impl("torch", moe_ref.bind),
    [Impl("cuda", moe_cuda.bind, moe_cuda.limits, capturable=True)],
    moe_cuda.check,
)
