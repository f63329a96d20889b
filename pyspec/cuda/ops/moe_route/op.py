"""`moe_route`: which experts a row takes, and what each counts."""

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe_route import cuda as moe_route_cuda

moe_route: Op[moe_ref.RouteSpec] = Op(
    "moe_route",
    Impl("torch", moe_ref.bind_route),
    [Impl("cuda", moe_route_cuda.bind, moe_route_cuda.limits, capturable=True)],
    moe_route_cuda.check,
)
