"""`compress`: rows that stand for several tokens."""

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.compress import ref as compress_ref

compress: Op[compress_ref.CompressSpec] = Op("compress", Impl("torch", compress_ref.bind))
