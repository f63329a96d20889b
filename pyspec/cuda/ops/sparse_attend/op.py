"""`sparse_attend`: a window of raw rows and chosen compressed ones under one softmax."""

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.sparse_attend import ref as sparse_ref

sparse_attend: Op[sparse_ref.SparseSpec] = Op("sparse_attend", Impl("torch", sparse_ref.bind))
