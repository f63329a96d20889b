"""`index_rows`: the compressed rows that a token attends to."""

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.index_rows import cuda as index_cuda
from pyspec.cuda.ops.index_rows import ref as index_ref
from pyspec.cuda.ops.index_rows.cases import check

index_rows: Op[index_ref.IndexSpec, index_ref.IndexRows] = Op(
    "index_rows",
    Impl("torch", index_ref.bind),
    [Impl("cuda", index_cuda.bind, index_cuda.limits, capturable=True)],
    check,
)
