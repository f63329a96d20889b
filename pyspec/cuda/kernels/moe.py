"""`moe` and `moe_route`: a feed-forward of experts, and the choice of them."""

from pyspec.cuda.kernels import moe_ref
from pyspec.cuda.op import Impl, Op

moe: Op[moe_ref.MoeSpec] = Op("moe", Impl("torch", moe_ref.bind))
moe_route: Op[moe_ref.RouteSpec] = Op(
    "moe_route", Impl("torch", moe_ref.bind_route), home="pyspec.cuda.kernels.moe:moe_route"
)
