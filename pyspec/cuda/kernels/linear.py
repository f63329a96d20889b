"""`linear`: few rows times a packed quantised matrix."""

from pyspec.cuda.kernels import linear_cuda, linear_ref
from pyspec.cuda.op import Impl, Op

linear: Op[linear_ref.LinearSpec] = Op(
    "linear",
    Impl("torch", linear_ref.bind),
    [Impl("cuda", linear_cuda.bind, linear_cuda.limits)],
    linear_cuda.check,
)
