"""`linear`: few rows times a packed quantised matrix; `linear_tall`: more than about fifty."""

from functools import partial

from pyspec.cuda.kernels import linear_cuda, linear_ref, linear_wgmma
from pyspec.cuda.op import Impl, Op

linear: Op[linear_ref.LinearSpec] = Op(
    "linear",
    Impl("torch", linear_ref.bind),
    [Impl("cuda", linear_cuda.bind, linear_cuda.limits)],
    linear_cuda.check,
)

linear_tall: Op[linear_ref.LinearSpec] = Op(
    "linear_tall",
    Impl("torch", linear_ref.bind),
    [Impl("wgmma", linear_wgmma.bind, linear_wgmma.limits)],
    partial(linear_cuda.check, n_rows=(49, 96, 127, 200)),
    home="pyspec.cuda.kernels.linear:linear_tall",
)
