"""Hostile cases for `compress`, shared by its tests, its benchmark and the check before it is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from pyspec.cuda.ops.compress.ref import SCORES, VALUES, Compress, CompressSpec
from pyspec.cuda.ops.index_rows.cases import pool_for
from pyspec.cuda.ops.ragged import PlacedCase, Ragged, copied, only, place
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool
from pyspec.slots.ring import RingRows

NAMES = (VALUES, SCORES)
OFF = 3e-5  # of a row's size: other orders of sums
ROUNDED = {
    torch.float32: 0.0,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
    torch.float8_e4m3fn: 2.0**-3,
}
"""Relative error of a value: one rounding may differ by one step."""


@dataclass(frozen=True, slots=True)
class Given:
    """Inputs of `compress`; NaN in padded rows, and in ring rows that hold nothing which still counts."""

    placed: PlacedCase
    values: Tensor
    scores: Tensor
    places: Tensor
    norm: Tensor
    freq: Tensor
    ring: RingRows
    pool: KVPool

    def copies(self) -> tuple[RingRows, KVPool]:
        """A ring and a pool as they are here, to be written."""
        old = self.pool
        ratio, device = old.tokens_per_row, old.k.device
        pool = KVPool(len(old.k), 1, old.head_dim, old.kv, device, tokens_per_row=ratio, keys_only=True)
        pool.k.copy_(old.k)
        return copied(self.ring), pool

    def run(self, compress: Compress, *batches: tuple[slice, Batch]) -> tuple[RingRows, KVPool]:
        """The ring and the pool behind these rows, one batch after another."""
        ring, pool = self.copies()
        for rows, batch in batches:
            compress(
                self.values[rows],
                self.scores[rows],
                self.places,
                self.norm,
                self.freq,
                ring,
                pool,
                batch,
            )
        return ring, pool


def make(case: Ragged, spec: CompressSpec, seed: int = 0, slack: int = 8, shift: int = 0) -> Given:
    """`shift`: added to all positions, while the pages stay those of early ones."""
    gen, placed = torch.Generator().manual_seed(seed), place(case, spec.device, seed)
    device = spec.device
    if shift:
        seqs = [replace(seq, n_past=seq.n_past + shift) for seq in placed.plain.seqs]
        batch, plain = (
            replace(b, positions=b.positions + shift, seqs=seqs) for b in (placed.batch, placed.plain)
        )
        placed = replace(placed, batch=batch, plain=plain)
    batch, of = placed.plain, 1 + spec.overlaps
    width, n, window = of * spec.dim, placed.plain.n_row, of * spec.ratio
    ring = RingRows(dict.fromkeys(NAMES, (width,)), placed.n_slot, window, slack, torch.float32, device)
    for name in NAMES:
        ring.rows[name].fill_(torch.nan)
    for seq in batch.seqs:
        first = max(0, seq.n_past - window)
        drawn = {
            name: 3 * torch.randn(seq.n_past - first, width, generator=gen).to(device) for name in NAMES
        }
        ring.write(seq.slot, first, drawn)
    # Values and scores lie in rows of more
    products = torch.full((n + case.pad[0], 2 * width + 4), torch.nan)
    products[:n] = 3 * torch.randn(n, 2 * width + 4, generator=gen)
    values, scores, _ = products.to(device).split([width, width, 4], -1)
    places = torch.randn(spec.ratio, width, generator=gen).to(device)
    norm = 1 + 0.3 * torch.randn(spec.dim, generator=gen)
    freq = 160000.0 ** (-torch.arange(0, spec.n_rot, 2, dtype=torch.float64) / max(spec.n_rot, 1))
    pool = pool_for(placed, spec.ratio, spec.dim, spec.kv, device)
    return Given(placed, values, scores, places, norm.to(device), freq.to(device), ring, pool)


def difference(given: Given, compress: Compress, reference: Compress, spec: CompressSpec) -> str | None:
    """How rows or rings differ from the reference's; None if they do not."""
    plain, every = given.placed.plain, slice(None)
    (ring, pool) = given.run(compress, (every, given.placed.batch))
    kept, want = given.run(reference, (slice(0, plain.n_row), plain))
    if not all(
        torch.equal(ring.rows[x].view(torch.int32), kept.rows[x].view(torch.int32)) for x in NAMES
    ):
        return "the ring differs from the reference's"
    got, right = (p.k[:, 0].float() for p in (pool, want))
    if not torch.equal(got.isnan(), right.isnan()):
        return "other rows are made than by the reference"
    made = ~right.isnan().any(-1)
    got, right = got[made], right[made]
    allowed = OFF * right.norm(dim=-1, keepdim=True) / spec.dim**0.5 + ROUNDED[spec.kv] * right.abs()
    over = float((got - right).abs().sub(allowed).amax()) if len(right) else 0.0
    return f"a row differs from the reference by {over:.2g} more than it may" if over > 0 else None


def check(compress: Compress, reference: Compress, spec: CompressSpec) -> str | None:
    """Blocks that end with the batch's first and last tokens, that have several pages or share one; rings that wrap; late positions; and
    the same bits for every cut of a prompt."""
    r = spec.ratio
    seqs = [(0, 1), (r - 1, 1), (r - 2, 5), (2 * r + 1, 17), (0, 3 * r + 2), (5 * r - 1, 2), (7 * r, 9)]
    cases = [
        (Ragged(seqs, 32, (3, 2)), 0),
        (Ragged([(3 * r + 5, 2 * r), (0, 3)], 16), 0),
        (Ragged(seqs[1:], 64), 1 << 20),
    ]
    for i, (case, shift) in enumerate(cases):
        if (why := difference(make(case, spec, i, shift=shift), compress, reference, spec)) is not None:
            return why
    n = 2 * r + 21
    given = make(Ragged([(0, n)], 16), spec, 5)
    plain, cuts = given.placed.plain, [0, 1, 4, 13, 14, 14 + r, n - 1, n]
    at_once = given.run(compress, (slice(None), plain))
    cut = given.run(compress, *(only(plain, 0, a, b - a) for a, b in pairwise(cuts)))
    if not torch.equal(at_once[1].k.view(torch.uint8), cut[1].k.view(torch.uint8)):
        return "a row has other bits when the prompt is cut"
    return None
