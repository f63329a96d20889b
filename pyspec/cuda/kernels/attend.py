"""`attend`: paged attention for decode, verify and drafter blocks."""

from pyspec.cuda.kernels import attend_ref
from pyspec.cuda.op import Impl, Op

attend: Op[attend_ref.AttendSpec] = Op("attend", Impl("torch", attend_ref.bind))
