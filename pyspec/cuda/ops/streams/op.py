"""`streams`: hyper-connections around the parts of a block."""

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.streams import cuda as streams_cuda
from pyspec.cuda.ops.streams import ref as streams_ref

streams: Op[streams_ref.StreamsSpec, streams_ref.Streams] = Op(
    "streams",
    Impl("torch", streams_ref.TorchStreams),
    [Impl("cuda", streams_cuda.bind, streams_cuda.limits, capturable=True)],
    streams_cuda.check,
)
