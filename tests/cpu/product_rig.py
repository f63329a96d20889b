"""Products of 16-bit rows: rows together against each row alone, to the bit; a rig as in hostile.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from pyspec.cuda.ops.linear import cpu
from pyspec.cuda.ops.linear.cpu import PLAIN, CpuLinearSpec, CpuRows, prepared, sample
from pyspec.gguf import GGMLType as G

Rig = Callable[[], str | None]
NUMBERS = (4, 5, 6, 9, 12, 15, 16, 17, 31, 32, 33, 50)
N_ROW = NUMBERS[-1]
PATTERNS = (0x00, 0xFF, 0x0F, 0x7F, 0x80, 0x81)


def same(a: Tensor, b: Tensor) -> bool:
    """To the bit, NaN as NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def of(type: G, raw: Tensor, rows: CpuRows) -> Tensor:
    out = torch.full((len(rows.x), len(raw) + 3), torch.nan)[:, : len(raw)]
    cpu.bind(CpuLinearSpec(torch.device("cpu"), type))(rows, raw, out, 1.0, None)
    return out


def picked(rows: CpuRows, first: int, n: int) -> CpuRows:
    """Those rows, by their numbers as they are."""
    assert rows.q is not None and rows.scales is not None and rows.sums is not None
    which = slice(first, first + n)
    return CpuRows(rows.x[which], rows.q[which], rows.scales[which], rows.sums[which])


def hostile_rows(n_in: int) -> Tensor:
    """Values of all sizes, rows that are not finite, of zeros, and of the largest numbers."""
    seed = torch.Generator().manual_seed(n_in)
    x = torch.randn(N_ROW, n_in, generator=seed) * torch.logspace(-6, 6, N_ROW)[:, None]
    x[3], x[8], x[20], x[21] = torch.nan, 0.0, 1e-42, 3e38
    x[11, n_in // 2] = -torch.inf
    x[30] = torch.where(torch.arange(n_in) % 2 == 0, 1.0, -1.0)
    x[31], x[32] = 1.0, -1.0
    return x


def fault_of(type: G, raw: Tensor, n_in: int) -> str | None:
    rows = prepared(hostile_rows(n_in), None, whole=True)
    alone = torch.cat([of(type, raw, picked(rows, i, 1)) for i in range(N_ROW)])
    for n in NUMBERS:
        for first in {0, N_ROW - n}:
            if not same(of(type, raw, picked(rows, first, n)), alone[first : first + n]):
                return f"{n} rows from {first} have other bits than alone"
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    well = same(of(type, raw, rows), alone)
    torch.set_num_threads(before)
    return None if well else "3 threads give other bits"


def has_bits_of_rows_alone(type: G, n_out: int, n_in: int) -> str | None:
    return fault_of(type, sample(type, n_out, n_in, torch.Generator().manual_seed(n_out)), n_in)


def holds_the_largest(type: G) -> str | None:
    """Every weight at an end of its range."""
    raw = sample(type, 9, 256, torch.Generator().manual_seed(9))
    for fill in PATTERNS:
        if (why := fault_of(type, torch.full_like(raw, fill), 256)) is not None:
            return f"weights of bytes {fill:#x}: {why}"
    return None


def product_rigs() -> Iterator[tuple[str, Rig]]:
    for type in sorted(cpu.TYPES - set(PLAIN)):
        short = type.block_size < 256
        for n_out, n_in in ((37, 576 if short else 512), (1, 64 if short else 256), (75, 768)):
            yield (
                f"product of {type.name} {n_out}x{n_in}",
                partial(has_bits_of_rows_alone, type, n_out, n_in),
            )
        yield f"product of {type.name}, the largest", partial(holds_the_largest, type)
