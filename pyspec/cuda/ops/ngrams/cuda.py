"""`ngrams` on NVIDIA GPUs: ngrams.cu. One launch makes places, three what the rows add. Positions and ids are read on the device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.jit import Arg, KernelFile
from pyspec.cuda.ops.ngrams.ref import GUARD, IDS, INPUTS, Ngrams, NgramsSpec, Norms, signed
from pyspec.cuda.ops.ragged import Ragged, place
from pyspec.slots.batch import Batch
from pyspec.slots.ring import RingRows

THREADS, MOST_HEADS, MAX_COLUMNS = 256, 512, 16384
FORMS = {
    "ngrams_rows": 11 * "p" + "iii",
    "ngrams_gate": 7 * "p" + "l" + "f",
    "ngrams_conv": 11 * "p" + "iii",
    "ngrams_keep": 9 * "p" + "iii",
}


def limits(spec: NgramsSpec) -> str | None:
    if spec.n % 4 or not 0 < spec.n <= MAX_COLUMNS:
        return f"{spec.n} columns; the kernel takes multiples of 4 up to {MAX_COLUMNS}"
    if spec.n_head > MOST_HEADS or spec.n_gram > 32:
        return f"{spec.n_head} heads of {spec.n_gram}-grams; the kernel takes up to {MOST_HEADS} of 32"
    return None


FILE = KernelFile[NgramsSpec](
    "ngrams",
    FORMS,
    lambda spec: {
        "GRAM": spec.n_gram,
        "HEADS": spec.n_head,
        "END": spec.end,
        "STREAMS": spec.n_stream,
        "COLUMNS": spec.n,
        "TAPS": spec.n_tap,
        "OP_ID": GUARD.number,
    },
)


class NgramsLaunch(Ngrams):
    """Of one spec. Ids go into the ring with what is convolved."""

    def __init__(self, spec: NgramsSpec) -> None:
        super().__init__(spec)
        self.wide = spec.n_stream * spec.n
        plain = replace(spec, multipliers=(), offsets=(), sizes=(1,) * spec.n_head)
        self.kernels, self.fault = FILE.named(spec.device, plain), faults.record(spec.device)
        self.tables = [
            torch.tensor([signed(x) for x in of], dtype=torch.int64, device=spec.device)
            for of in (spec.multipliers, spec.sizes, spec.offsets)
        ]

    def rows(self, ring: RingRows, batch: Batch) -> Tensor:
        n_row = len(batch.tokens)
        places = torch.empty(n_row * self.spec.n_head, dtype=torch.int64, device=batch.tokens.device)
        seqs = batch.row_seq, batch.seq_start, batch.seq_slot
        given = batch.tokens, batch.positions, *seqs, *self.tables, self._plane(ring, IDS, 1)
        self._run("ngrams_rows", (n_row, 1), *given, places, self.fault, *self._sizes(ring, n_row))
        return places

    def mixed(
        self, x: Tensor, made: Tensor, norms: Norms, taps: Tensor, ring: RingRows, batch: Batch
    ) -> Tensor:
        s, n_row, wide = self.spec, len(x), self.wide
        x = x.contiguous()
        if made.stride(1) != 1 or made.stride(0) % 4 or made.data_ptr() % 16:
            made = made.contiguous()
        assert x.shape == (n_row, wide) and made.shape == (n_row, wide + s.n)
        assert x.dtype == made.dtype == taps.dtype == torch.float32
        assert taps.shape == (wide, s.n_tap) and taps.is_contiguous()
        assert all(w.shape == (wide,) and w.is_contiguous() and w.dtype == torch.float32 for w in norms)
        value, inputs, out = (torch.empty_like(x) for _ in range(3))
        step = made.stride(0), s.eps
        self._run("ngrams_gate", (n_row, s.n_stream), x, made, *norms, value, inputs, *step)
        kept, sizes = self._plane(ring, INPUTS, wide), self._sizes(ring, n_row)
        seqs = batch.positions, batch.row_seq, batch.seq_start, batch.seq_slot
        given = x, value, inputs, taps, kept, *seqs, out, self.fault, *sizes
        self._run("ngrams_conv", (n_row, -(-wide // (4 * THREADS))), *given)
        ids = self._plane(ring, IDS, 1)
        self._run("ngrams_keep", (n_row, 1), batch.tokens, inputs, ids, kept, *seqs, self.fault, *sizes)
        return out

    def _plane(self, ring: RingRows, name: str, n: int) -> Tensor:
        plane = ring.rows[name]
        assert plane.dtype == torch.float32 and plane.is_contiguous() and plane.shape[2:] == (n,)
        assert ring.window >= self.spec.window
        return plane

    def _sizes(self, ring: RingRows, n_row: int) -> tuple[int, int, int]:
        return len(ring.rows[IDS]), ring.n_row, n_row

    def _run(self, name: str, grid: tuple[int, int], *args: Arg) -> None:
        if grid[0]:
            self.kernels[name].launch(grid, THREADS, args, overlap=True)


bind = NgramsLaunch


def check(launch: Ngrams, reference: Ngrams, spec: NgramsSpec) -> str | None:
    """Rounds of ragged pieces with padding and ends among their tokens, longer than rings and of one row; rows, streams and rings."""
    gen, wide = torch.Generator().manual_seed(0), spec.n_stream * spec.n
    taps, *norms = (
        torch.randn(wide, *more, generator=gen).to(spec.device) for more in ((spec.n_tap,), (), (), ())
    )
    dims = {IDS: (1,), INPUTS: (wide,)}
    rings = [RingRows(dims, 5, spec.window, 4, torch.float32, spec.device) for _ in range(2)]
    lengths = [0, 0, 0]
    for widths in ((1, spec.window + 20, 3), (2, 1, spec.n_gram), (3, 4, 1)):
        placed = place(Ragged(list(zip(lengths, widths, strict=True)), 16, (2, 1)), spec.device)
        n = placed.plain.n_row
        tokens = torch.randint(0, 1000, (n + 2,), generator=gen).to(spec.device)
        tokens[1::5] = spec.end
        plain = replace(placed.plain, tokens=tokens[:n])
        padded = replace(placed.batch, tokens=tokens)
        got, want = launch.rows(rings[0], padded), reference.rows(rings[1], plain)
        if not torch.equal(got[: len(want)], want):
            return "n-grams have other rows than the reference's"
        x, made = (torch.randn(n + 2, w, generator=gen).to(spec.device) for w in (wide, wide + spec.n))
        mine = launch.mixed(x, made, (norms[0], norms[1], norms[2]), taps, rings[0], padded)[:n]
        theirs = reference.mixed(x[:n], made[:n], (norms[0], norms[1], norms[2]), taps, rings[1], plain)
        if not float(off := ((mine - theirs).norm(dim=-1) / theirs.norm(dim=-1)).amax()) < 1e-5:
            return f"a row differs from the reference by {float(off):.2g} of its size"
        lengths = [a + b for a, b in zip(lengths, widths, strict=True)]
    for name in dims:
        if not float((rings[0].rows[name] - rings[1].rows[name]).abs().amax()) < 1e-4:
            return f"{name} in rings differ from the reference's"
    return None
