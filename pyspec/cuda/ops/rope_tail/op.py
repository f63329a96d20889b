"""`rope_tail`: heads whose last dims are turned, normed before that if asked for."""

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.rope_tail import cuda as tail_cuda
from pyspec.cuda.ops.rope_tail import ref as tail_ref

rope_tail: Op[tail_ref.RopeTailSpec, tail_ref.RopeTail] = Op(
    "rope_tail",
    Impl("torch", tail_ref.bind, capturable=True),
    [Impl("cuda", tail_cuda.bind, tail_cuda.limits, capturable=True)],
    tail_cuda.check,
)
