"""Reference of `convolve` in plain torch: rows of a block drafter, mixed with the rows before them by weights that the rows give.

Each column has weights of its own, the same for all rows; each group of columns has weights that a row's input gives. Both are added. A sequence's first rows
have none before them: rows of another sequence are never read. Source: llama.cpp `dflash` (DFlash2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ConvolveSpec:
    """Rows of n columns, in groups of `group`. n_tap: rows that each is made of, itself included."""

    device: torch.device
    n: int
    n_tap: int
    group: int

    @property
    def n_group(self) -> int:
        return self.n // self.group


Given = tuple[Tensor, Tensor, Tensor, Tensor, int, Tensor | None]
Convolve = Callable[[*Given], Tensor]
"""convolve(x, given, base, row_seq, side, residual): residual + sum over taps t of (base[side, t] + given[row, side, t, group]) * x[row - t],
[row, n] f32. A row's bits depend on its sequence alone.

x, residual  [row, n] f32
given        [row, 2 * n_tap * n_group] f32, by side, tap and group
base         [2, n_tap, n] f32
row_seq      [row] int32, the sequence of each row
"""


def check_args(spec: ConvolveSpec, *args: *Given) -> None:
    """Assert what kernels rely on, which read memory by the spec alone."""
    x, given, base, row_seq, side, residual = args
    n_row = len(x)
    assert x.shape == (n_row, spec.n) and given.shape == (n_row, 2 * spec.n_tap * spec.n_group)
    assert base.shape == (2, spec.n_tap, spec.n) and side in (0, 1)
    assert all(t.is_contiguous() and t.dtype == torch.float32 for t in (x, given, base))
    assert row_seq.shape == (n_row,) and row_seq.dtype == torch.int32 and row_seq.is_contiguous()
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())


def bind(spec: ConvolveSpec) -> Convolve:
    def convolve(*args: *Given) -> Tensor:
        x, given, base, row_seq, side, residual = args
        s, n_row = spec, len(x)
        own = given.view(n_row, 2, s.n_tap, s.n_group, 1)[:, side]
        weights = (base[side].view(s.n_tap, s.n_group, s.group) + own).view(n_row, s.n_tap, s.n)
        y = weights[:, 0] * x
        for t in range(1, min(s.n_tap, n_row)):
            is_own = (row_seq[t:] == row_seq[:-t])[:, None]
            y[t:] += torch.where(is_own, weights[t:, t] * x[:-t], 0.0)
        return y if residual is None else residual + y

    return convolve
