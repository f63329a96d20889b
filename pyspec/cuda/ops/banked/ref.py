"""A row of a stream mixed with rows that were kept of it earlier (Kimi K3's residual attention). Reference in plain torch.

    kept    several [row, n]  f32
    x       [row, n]          f32    the stream
    weight  [n]               f32    of scores
    out     [row, n]          f32    sum_i p_i s_i over kept rows and x, p = softmax(rms(s_i) . weight)

Scores are of normed rows, and the sum is of rows as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.exact import by_row


@dataclass(frozen=True, slots=True)
class BankedSpec:
    """n_kept: kept rows beside x."""

    device: torch.device
    n: int
    n_kept: int
    eps: float


Banked = Callable[[Sequence[Tensor], Tensor, Tensor], Tensor]
"""The launch that the op binds: (kept, x, weight) -> out."""


def bind(spec: BankedSpec) -> Banked:
    def mixed(*rows: Tensor) -> tuple[Tensor, ...]:
        *all_rows, weight = rows
        streams = torch.stack(all_rows, 1)
        scores = (F.rms_norm(streams, (spec.n,), None, spec.eps) * weight[:1]).sum(-1)
        return ((scores.softmax(-1)[..., None] * streams).sum(1),)

    def banked(kept: Sequence[Tensor], x: Tensor, weight: Tensor) -> Tensor:
        assert len(kept) == spec.n_kept
        return by_row(mixed, *kept, x, weight.expand(len(x), 1, spec.n))[0]

    return banked
