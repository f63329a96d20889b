"""`ring_places`: where the rows of a batch are in rings of pages."""

from __future__ import annotations

from pyspec.cuda.op import Impl, Op, implemented
from pyspec.cuda.ops.ring_places import cpu, cuda, ref

ring_places: Op[ref.RingPlacesSpec, ref.RingPlaces] = Op(
    "ring_places",
    Impl("torch", ref.bind, capturable=True),
    implemented(cuda, cpu),
    cuda.check,
    shapes=lambda device: [ref.RingPlacesSpec(device)],
)
