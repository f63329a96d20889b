"""`angles`: cos and sin of the rope for the rows of a batch."""

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.angles import cuda as angles_cuda
from pyspec.cuda.ops.angles import ref as angles_ref

angles: Op[angles_ref.AnglesSpec, angles_ref.Angles] = Op(
    "angles",
    Impl("torch", angles_ref.bind, capturable=True),
    [Impl("cuda", angles_cuda.bind, angles_cuda.limits, capturable=True)],
    angles_cuda.check,
)
