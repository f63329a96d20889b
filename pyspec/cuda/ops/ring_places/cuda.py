"""`ring_places` on NVIDIA GPUs: one launch (ring_places.cu)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda.jit import KernelFile
from pyspec.cuda.ops.ring_places.ref import RingPlaces, RingPlacesSpec
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch, Seq, lay_out
from pyspec.slots.table import SlotTable

THREADS = 128


FILE: KernelFile[RingPlacesSpec] = KernelFile("ring_places", "ppppp" + "l" + "iiiii")


def bind(spec: RingPlacesSpec) -> RingPlaces:
    kernel = FILE.kernel(spec.device, spec)

    def ring_places(batch: Batch, n_ring: int, null_row: int) -> tuple[Tensor, Tensor]:
        n_row, (n_place, n_page) = batch.positions.shape[0], batch.page_table.shape
        assert batch.positions.dtype == torch.int64 and batch.seq_slot.dtype == torch.int32
        assert len(batch.seq_slot) == n_place and len(batch.row_seq) == n_row
        rows, pages = torch.empty_like(batch.positions), batch.page_table.new_empty(n_place, n_page)
        if n := max(n_row, n_place * n_page):
            given = batch.positions, batch.row_seq, batch.seq_slot, rows, pages, null_row
            sizes = n_row, n_place, n_page, n_ring, batch.page_size
            kernel.launch((-(-n // THREADS),), THREADS, (*given, *sizes))
        return rows, pages

    return ring_places


def check(launch: RingPlaces, reference: RingPlaces, spec: RingPlacesSpec) -> str | None:
    """Ragged batches with padding and without, behind texts of many rings; rings of one page and of more pages than the text."""
    for size, arena in ((8, None), (16, Arena(5, 70, spec.device)), (64, Arena(3, 20, spec.device))):
        table = SlotTable(3, 300, size)
        seqs = []
        for slot, n_past, width in ((2, 0, 3), (0, 61 * size // 4 + 5, 1), (1, 7 * size, 9)):
            table.acquire(table.slots[slot], 20 * size)
            seqs.append(Seq(slot, n_past, [1] * width, n_out=width))
        batch = lay_out(table, seqs, spec.device, arena=arena)
        for n_ring in (1, 3, 7, 100):
            got, want = (run(batch, n_ring, 3 * n_ring * size) for run in (launch, reference))
            for name, a, b in zip(("rows", "pages"), got, want, strict=True):
                if not torch.equal(a, b):
                    return f"{name} in rings of {n_ring} pages of {size} differ from the reference's"
    return None
