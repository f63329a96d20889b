"""The batch as attention over chosen blocks of tokens reads it: each row is a sequence of its own, whose pages are the blocks that it chose
and, behind them, those of the block that is not complete with it. Reference in plain torch.

    chosen  [row, top_k]  int32   blocks of `ratio` tokens, ascending, -1 behind the last one (op `index_rows`)

A page of such a row has as many tokens as divide both a block and a page of the text, so attention goes over them as over any text: keys
are turned by their own positions already. A row at position p sees the chosen blocks and the (p + 1) % ratio tokens behind the last complete
one, up to its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda.guard import Guard
from pyspec.slots.batch import Batch, Seq

GUARD = Guard(16)

SeenPages = Callable[[Tensor, Batch], Batch]
"""seen_pages(chosen, batch) -> the same rows as sequences over what they see"""


@dataclass(frozen=True, slots=True)
class SeenPagesSpec:
    """`top_k` blocks of `ratio` tokens are chosen at most."""

    device: torch.device
    ratio: int
    top_k: int

    def page_of(self, page_size: int) -> int:
        """Tokens of a row's page, in texts with pages of this size."""
        return math.gcd(self.ratio, page_size)

    def n_page(self, page_size: int) -> int:
        """Pages of a row."""
        return (self.top_k + 1) * (self.ratio // self.page_of(page_size))


def as_seen(
    spec: SeenPagesSpec,
    batch: Batch,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    row_seq: Tensor,
    seq_start: Tensor,
) -> Batch:
    """The batch of these rows. pages [row, page], lo, hi [row] int64; row_seq [row], seq_start [row + 1] int32"""
    n, size = len(hi), spec.page_of(batch.page_size)
    return replace(
        batch,
        seqs=[Seq(0, 0, (0,))] * n if batch.bucket is None else (),
        starts=range(n + 1),
        page_table=pages,
        lo=lo,
        hi=hi,
        row_seq=row_seq,
        seq_start=seq_start,
        page_size=size,
        max_hi=_ends(spec, batch.seqs) if batch.bucket is None else (),
        pages=(),
    )


def numbers(n: int, device: torch.device) -> Tensor:
    """0 to n as sequences of one row begin. [n + 1] int32"""
    return torch.arange(n + 1, dtype=torch.int32, device=device)


def _ends(spec: SeenPagesSpec, seqs: Sequence[Seq]) -> list[int]:
    """Upper bounds of `hi` of all rows, as far as the host knows where they are."""
    at = [np.arange(seq.n_past + 1, seq.n_past + seq.width + 1) for seq in seqs]
    most = (spec.top_k + 1) * spec.ratio - 1
    ends = [np.minimum(n // spec.ratio, spec.top_k) * spec.ratio + n % spec.ratio for n in at]
    return [
        int(end) if not seq.slack else most for seq, own in zip(seqs, ends, strict=True) for end in own
    ]


def bind(spec: SeenPagesSpec) -> SeenPages:
    ratio = spec.ratio

    def seen_pages(chosen: Tensor, batch: Batch) -> Batch:
        size, of = batch.page_size, spec.page_of(batch.page_size)
        each, device = ratio // of, chosen.device
        at = batch.positions[:, None]
        n_chosen = (chosen >= 0).sum(1, keepdim=True)
        place = torch.arange(spec.n_page(size), device=device)  # of a row's page
        block = torch.nn.functional.pad(chosen.long(), (0, 1))[:, place // each]
        block = torch.where(place // each == n_chosen, (at + 1) // ratio, block)
        # what stands behind a row's last token is never read: its first page stands there
        first = block * ratio + place % each * of
        ends = n_chosen * ratio + (at + 1) % ratio
        is_real = batch.row_seq[:, None] >= 0
        first = torch.where((place * of < ends) & is_real, first, 0)
        seq = batch.row_seq.clamp(min=0).long()[:, None]
        pages = batch.page_table[seq, first // size] * (size // of) + first % size // of
        hi = torch.where(is_real, ends, 0)[:, 0]
        starts = numbers(len(chosen), device)
        row_seq = torch.where(is_real[:, 0], starts[:-1], -1)
        return as_seen(spec, batch, pages, torch.zeros_like(hi), hi, row_seq, starts)

    return seen_pages
