"""`seen_pages` on NVIDIA GPUs: one launch (seen_pages.cu). Positions and pages are read on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.jit import KernelFile
from pyspec.cuda.ops.ragged import Ragged, place
from pyspec.cuda.ops.seen_pages.ref import GUARD, SeenPages, SeenPagesSpec, as_seen, numbers
from pyspec.slots.batch import Batch

THREADS = 128


FILE = KernelFile[SeenPagesSpec]("seen_pages", 9 * "p" + 8 * "i", lambda spec: {"OP_ID": GUARD.number})


def bind(spec: SeenPagesSpec) -> SeenPages:
    kernel, fault = FILE.kernel(spec.device, spec), faults.record(spec.device)

    def seen_pages(chosen: Tensor, batch: Batch) -> Batch:
        (n_row, top_k), size = chosen.shape, batch.page_size
        assert top_k == spec.top_k and chosen.dtype == torch.int32 and chosen.is_contiguous()
        assert batch.page_table.dtype == batch.positions.dtype == torch.int64
        assert len(batch.positions) == len(batch.row_seq) == n_row
        n_page, of = spec.n_page(size), spec.page_of(size)
        pages = batch.page_table.new_empty(n_row, n_page)
        lo, hi = (torch.empty_like(batch.positions) for _ in range(2))
        row_seq = torch.empty_like(batch.row_seq)
        if n_row:
            n_seq, n_col = batch.page_table.shape
            sizes = (n_seq, n_col, size, spec.ratio, of, top_k, n_page, n_row)
            args = chosen, batch.page_table, batch.positions, batch.row_seq, pages, lo, hi, row_seq
            kernel.launch((n_row,), THREADS, (*args, fault, *sizes), overlap=True)
        return as_seen(spec, batch, pages, lo, hi, row_seq, numbers(n_row, hi.device))

    return seen_pages


def check(launch: SeenPages, reference: SeenPages, spec: SeenPagesSpec) -> str | None:
    """Ragged batches with padding, of rows that see fewer blocks than they may choose, and more; pages that blocks divide, and others."""
    gen, full = torch.Generator().manual_seed(0), spec.ratio * spec.top_k
    seqs = [(0, 1), (spec.ratio - 1, 3), (full - 2, 5), (3 * full + 7, 2)]
    for size in (16, 32, 3):
        placed = place(Ragged(seqs, size, (3, 2)), spec.device)
        rows = []
        for at in placed.plain.positions.tolist():
            n_seen = (at + 1) // spec.ratio
            own = torch.randperm(n_seen, generator=gen)[: spec.top_k].sort().values
            rows.append(torch.nn.functional.pad(own, (0, spec.top_k - len(own)), value=-1))
        chosen = torch.stack([*rows, *[torch.full_like(rows[0], -1)] * 3]).int().to(spec.device)
        n = placed.plain.n_row
        got, want = launch(chosen, placed.batch), reference(chosen[:n], placed.plain)
        for name in ("page_table", "lo", "hi", "row_seq"):
            if not torch.equal(getattr(got, name)[:n], getattr(want, name)):
                return f"{name} differs from the reference's in pages of {size} tokens"
        if bool((got.row_seq[n:] != -1).any() or got.hi[n:].any()):
            return "padding sees something"
    return None
