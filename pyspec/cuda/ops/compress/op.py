"""`compress`: rows that stand for several tokens."""

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.compress import cuda as compress_cuda
from pyspec.cuda.ops.compress import ref as compress_ref
from pyspec.cuda.ops.compress.cases import check

compress: Op[compress_ref.CompressSpec, compress_ref.Compress] = Op(
    "compress",
    Impl("torch", compress_ref.bind),
    [Impl("cuda", compress_cuda.bind, compress_cuda.limits, capturable=True)],
    check,
)
