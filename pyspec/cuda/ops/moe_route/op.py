"""`moe_route`: which experts a row takes, and what each counts."""

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe_route import cuda as moe_route_cuda
from pyspec.cuda.ops.moe_route import triton as moe_route_triton

moe_route: Op[moe_ref.RouteSpec, moe_ref.Route] = Op(
    "moe_route",
    Impl("torch", moe_ref.bind_route),
    [
        Impl("cuda", moe_route_cuda.bind, moe_route_cuda.limits, capturable=True),
        Impl("triton", moe_route_triton.bind, moe_route_triton.limits, capturable=True),
    ],
    moe_route_cuda.check,
)
