"""`ring_places`: where the rows of a batch are in rings of pages."""

from __future__ import annotations

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.ring_places import cpu, cuda, ref

ring_places: Op[ref.RingPlacesSpec, ref.RingPlaces] = declared(
    ref, cuda, cpu, shapes=lambda device: [ref.RingPlacesSpec(device)], capturable=True
)
