"""`linear`: few rows times a packed quantised matrix; `linear_tall`: more than about thirty."""

from functools import partial

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear import ref as linear_ref
from pyspec.cuda.ops.linear import triton as linear_triton
from pyspec.cuda.ops.linear import wgmma as linear_wgmma

linear: Op[linear_ref.LinearSpec, linear_ref.Linear] = Op(
    "linear",
    Impl("torch", linear_ref.bind),
    [
        Impl("cuda", linear_cuda.bind, linear_cuda.limits),
        Impl("triton", linear_triton.bind, linear_triton.limits, capturable=True, tune=linear_triton.tune),
    ],
    linear_cuda.check,
)

linear_tall: Op[linear_ref.LinearSpec, linear_ref.Linear] = Op(
    "linear_tall",
    Impl("torch", linear_ref.bind),
    [Impl("wgmma", linear_wgmma.bind, linear_wgmma.limits)],
    partial(linear_cuda.check, n_rows=(40, 49, 96, 127, 200)),
    home="pyspec.cuda.ops.linear.op:linear_tall",
)
