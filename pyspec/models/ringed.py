"""The places of a batch in rings of pages: made once a forward for all layers with windows, as angles are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from pyspec.cuda.ops.ring_places.op import ring_places
from pyspec.cuda.ops.ring_places.ref import RingPlacesSpec
from pyspec.errors import OutOfBounds
from pyspec.slots.batch import Batch
from pyspec.slots.memory import Memory


class Ringed:
    """The rings of a model's memory, which may have none."""

    def __init__(self, memory: Memory, device: torch.device) -> None:
        self.sizes, self.n_chunk = memory.rings, memory.n_chunk
        self.capturable = True
        if self.sizes:
            spec = RingPlacesSpec(device)
            self.run = ring_places.bind(spec)
            self.capturable = ring_places.chosen(spec).capturable

    def __call__(self, batch: Batch) -> Mapping[int, Batch]:
        """The batch for each size of rings, by pages of a ring.

        Raises OutOfBounds where a sequence has more rows than rings have room for beside the window.
        """
        if not self.sizes:
            return {}
        for seq in batch.seqs:
            if seq.width > self.n_chunk:
                raise OutOfBounds(
                    f"slot {seq.slot} rows of a forward", seq.width, self.n_chunk + 1, seq.slot
                )
        found = {}
        for n, null_row in self.sizes.items():
            rows, pages = self.run(batch, n, null_row)
            found[n] = replace(batch, kv_rows=rows, page_table=pages, pages=())
        return found
