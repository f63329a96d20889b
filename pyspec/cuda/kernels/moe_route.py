"""`moe_route`: which experts a row takes, and what each counts."""

from pyspec.cuda.kernels import moe_ref, moe_route_cuda
from pyspec.cuda.op import Impl, Op

moe_route: Op[moe_ref.RouteSpec] = Op(
    "moe_route",
    Impl("torch", moe_ref.bind_route),
    [Impl("cuda", moe_route_cuda.bind, moe_route_cuda.limits, capturable=True)],
    moe_route_cuda.check,
)
