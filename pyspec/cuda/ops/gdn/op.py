"""`gdn`: fold the last verify into the state, then run this forward's rows (Gated DeltaNet)."""

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.gdn import cuda as gdn_cuda
from pyspec.cuda.ops.gdn import numba as gdn_numba
from pyspec.cuda.ops.gdn import ref as gdn_ref
from pyspec.cuda.ops.gdn import triton as gdn_triton

gdn: Op[gdn_ref.GdnSpec, gdn_ref.Gdn] = Op(
    "gdn",
    Impl("torch", gdn_ref.bind),
    [
        Impl("cuda", gdn_cuda.bind, gdn_cuda.limits, capturable=True),
        Impl("triton", gdn_triton.bind, gdn_triton.limits, capturable=True),
        Impl("numba", gdn_numba.bind, gdn_numba.limits),
    ],
    gdn_cuda.check,
)
