"""`norms`: norms of rows that stay f32, alone, with some rows once more, or of two inputs side by side."""

from pyspec.cuda.kernels import norms_cuda, norms_ref
from pyspec.cuda.op import Impl, Op

norms: Op[norms_ref.NormsSpec] = Op(
    "norms",
    Impl("torch", norms_ref.bind, capturable=True),
    [Impl("cuda", norms_cuda.bind, norms_cuda.limits, capturable=True)],
    norms_cuda.check,
)
