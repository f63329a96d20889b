"""`sparse_attend`: a window of raw rows and chosen compressed ones under one softmax."""

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.sparse_attend import cuda as sparse_cuda
from pyspec.cuda.ops.sparse_attend import ref as sparse_ref
from pyspec.cuda.ops.sparse_attend.cases import check

sparse_attend: Op[sparse_ref.SparseSpec, sparse_ref.SparseAttend] = Op(
    "sparse_attend",
    Impl("torch", sparse_ref.bind),
    [Impl("cuda", sparse_cuda.bind, sparse_cuda.limits, capturable=True)],
    check,
)
