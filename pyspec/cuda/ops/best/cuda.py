"""`best` on NVIDIA GPUs: one launch (best.cu). Rows are cut into parts, as many as keep all multiprocessors at work.

The parts' results and tickets lie in one buffer of a device, so all launches must be on one stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pyspec.cuda.context import per_device
from pyspec.cuda.jit import KernelFile
from pyspec.cuda.ops.best.ref import Best, BestSpec, IntoMemory

THREADS = 256  # of a CTA; as many parts a row has at most
PER_SM = 2  # CTAs of a multiprocessor: enough loads under way, and few to wait for
LEAST = 2 * 4 * THREADS  # columns that are worth a CTA: two loads a thread
MAX_ROWS = 1024  # of a launch
MAX_VOCAB = 1 << 30  # columns are counted in 32 bits
# Rows, columns of the check
SIZES = (1, 248_320), (9, 151_937), (4, 300_000), (133, 2_050), (12, 5), (12, 1)


FILE = KernelFile[BestSpec]("best", "pppppiii", lambda spec: {"THREADS": THREADS})


def n_parts(n_row: int, n_vocab: int, n_multiprocessor: int) -> int:
    """CTAs of a row."""
    return min(-(-n_vocab // LEAST), -(-PER_SM * n_multiprocessor // n_row), THREADS)


@per_device
def _workspace(device: torch.device, n_multiprocessor: int) -> tuple[Tensor, Tensor]:
    """(shares of as many parts as a launch may have, tickets of as many rows)."""
    shares = torch.empty(PER_SM * n_multiprocessor + MAX_ROWS, 2, dtype=torch.int32, device=device)
    return shares, torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)


class BestLaunch(IntoMemory):
    def __init__(self, device: torch.device) -> None:
        self.kernel = FILE.kernel(device, BestSpec(device))
        self.n_multiprocessor = torch.cuda.get_device_properties(device).multi_processor_count
        self.shares, self.tickets = _workspace(device, self.n_multiprocessor)

    def _run(self, logits: Tensor, tokens: Tensor | None, pairs: Tensor | None) -> None:
        logits, (n_row, n_vocab) = logits.contiguous(), logits.shape
        assert logits.dtype == torch.float32 and 0 < n_vocab <= MAX_VOCAB
        for first in range(0, n_row, MAX_ROWS):
            n = min(MAX_ROWS, n_row - first)
            n_part = n_parts(n, n_vocab, self.n_multiprocessor)
            own = logits[first:], self.shares, self.tickets
            into = (
                None if tokens is None else tokens[first:],
                None if pairs is None else pairs.view(-1)[first:],
            )
            args = *own, *into, n_vocab, -(-(n_vocab // 4) // n_part), n_row
            self.kernel.launch((n_part, n), THREADS, args, overlap=True)


_launch = per_device(BestLaunch)


def bind(spec: BestSpec) -> BestLaunch:
    """One for all of a device, and quickly: every round asks."""
    return _launch(spec.device)


def hostile(n_row: int, n_vocab: int, gen: torch.Generator) -> Tensor:
    """[n_row, n_vocab] f32: rows of every kind that may be taken wrongly, over and over."""
    logits = torch.randn(n_row, n_vocab, generator=gen)
    middle, last = n_vocab // 2, n_vocab - 1
    for i, row in enumerate(logits):
        kind = i % 12
        if kind == 1:
            row.fill_(-torch.inf)
        elif kind == 2:  # equal ones in all parts
            row.copy_(torch.randint(0, 2, (n_vocab,), generator=gen).float())
        elif kind == 3:  # the largest number, inf, before NaN
            row[n_vocab // 3], row[middle], row[last] = torch.inf, torch.nan, torch.nan
        elif kind == 4:  # zeros of both signs
            row.copy_(torch.where(row > 0, 0.0, -0.0))
        elif kind == 5:
            row[last] = 9.0
        elif kind == 6:  # NaN with a sign is no less
            row.fill_(-torch.nan)
            row[0] = torch.inf if i % 24 < 12 else torch.nan
        elif kind == 7:
            row[0] = row[last] = 9.0
        elif kind == 8:
            row.fill_(-torch.inf)
            row[last] = -3.4e38
        elif kind == 9:
            row[middle] = row[last] = torch.inf
        elif kind == 10:  # below all others are negative numbers, and ascending
            row.copy_(-row.abs().sort(descending=True).values - 1)
        elif kind == 11:  # smaller than a normal number is
            row.mul_(1e-41)
    return logits


def _cases(sizes: Sequence[tuple[int, int]], device: torch.device) -> Iterator[Tensor]:
    """Rows at any alignment: leave out the first numbers made."""
    gen = torch.Generator().manual_seed(0)
    for n_row, n_vocab in sizes:
        for skip in (0, 1) if n_row == 1 else (1,):
            yield hostile(n_row + skip, n_vocab, gen).to(device)[skip:]


def _bits(pairs: Tensor) -> Tensor:
    """Equal for the same values, of zeros for the same signs."""
    return pairs.masked_fill(pairs.isnan(), 0.5).view(torch.int64)


def check(
    launch: Best, reference: Best, spec: BestSpec, sizes: Sequence[tuple[int, int]] = SIZES
) -> str | None:
    """Ties far from each other, zeros of both signs, rows of -inf, of NaN, of one column, of odd length."""
    for logits in _cases(sizes, spec.device):
        where = f"of {logits.shape[0]} rows of {logits.shape[1]} logits"
        tokens, pairs = launch.tokens(logits), launch.pairs(logits)
        want, both = reference.tokens(logits), reference.pairs(logits)
        if n_bad := int((tokens != want).sum()):
            return f"{n_bad} {where} have another best token than the reference's"
        if not torch.equal(_bits(pairs), _bits(both)):
            return f"values {where} differ from the reference's"
    return None
