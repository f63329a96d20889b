"""`streams`: hyper-connections around the parts of a block."""

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.streams import ref as streams_ref

streams: Op[streams_ref.StreamsSpec] = Op("streams", Impl("torch", streams_ref.TorchStreams))
