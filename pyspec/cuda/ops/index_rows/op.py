"""`index_rows`: the compressed rows that a token attends to."""

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.index_rows import ref as index_ref

index_rows: Op[index_ref.IndexSpec] = Op("index_rows", Impl("torch", index_ref.bind))
