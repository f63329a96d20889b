"""`ring_places`: where the rows of a batch are in rings of pages."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.ring_places import cpu as ring_places_cpu
from pyspec.cuda.ops.ring_places import cuda as ring_places_cuda
from pyspec.cuda.ops.ring_places import ref as ring_places_ref


def shapes(device: torch.device) -> list[ring_places_ref.RingPlacesSpec]:
    return [ring_places_ref.RingPlacesSpec(device)]


ring_places: Op[ring_places_ref.RingPlacesSpec, ring_places_ref.RingPlaces] = Op(
    "ring_places",
    Impl("torch", ring_places_ref.bind, capturable=True),
    [
        Impl(
            "cuda",
            ring_places_cuda.bind,
            ring_places_cuda.limits,
            capturable=True,
            programs=ring_places_cuda.programs,
        ),
        Impl("cpu", ring_places_cpu.bind, ring_places_cpu.limits, capturable=True),
    ],
    ring_places_cuda.check,
    shapes=shapes,
)
