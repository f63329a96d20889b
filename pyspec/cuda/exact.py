"""Batch-invariant mode (`--exact`): always use the same kernel and summation order. Each thread of an engine has its own setting.

Products, recurrences and attention have faster kernels for many rows, which sum in another order than those for few. In this mode
launches are bound to one kernel for any number of rows, and libraries get a fixed number of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.kernel_context import current

PASS = 64  # rows per call of a library


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T by torch, [row, n_in] -> [row, n_out]; in passes in exact mode."""
    return (
        in_passes(x, lambda part: F.linear(part, weight)) if current().is_exact else F.linear(x, weight)
    )


def by_row(run: Callable[..., tuple[Tensor, ...]], *rows: Tensor) -> tuple[Tensor, ...]:
    """run(*rows); on CPUs in exact mode one row [1, ...] at a time, because small sums of a library depend on the number of rows, too."""
    if not current().is_exact or rows[0].device.type != "cpu" or len(rows[0]) <= 1:
        return run(*rows)
    each = [run(*one) for one in zip(*(t.split(1) for t in rows), strict=True)]
    return tuple(torch.cat(parts) for parts in zip(*each, strict=True))


def in_passes(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """run(x) in passes of PASS rows: a library chooses its kernel, and so the order of its sums, by the number of rows."""
    if not len(x):
        return run(x)
    assert x.dim() == 2
    parts = [run(F.pad(part, (0, 0, 0, PASS - len(part))))[: len(part)] for part in x.split(PASS)]
    return torch.cat(parts)
