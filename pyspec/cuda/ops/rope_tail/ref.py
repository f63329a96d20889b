"""Reference of `rope_tail` in plain torch: rope on the last dims of heads, after an optional norm.

    x          [row, head, dim]  f32
    positions  [row]             int64
    freq       [n_rot / 2]       f64    angles of one position
    weight     [dim]             f32    of the norm; None: the norm has none

Adjacent pairs of the last 2 * len(freq) dims are turned by position * frequency, which needs more than f32 at late positions.
`sign` -1 turns back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeTailSpec:
    """`normed`: each head is divided by its root mean square before it is turned."""

    device: torch.device
    dim: int
    n_rot: int
    normed: bool
    eps: float


class RopeTail(Protocol):
    """The launch that the op binds."""

    def __call__(
        self, x: Tensor, positions: Tensor, freq: Tensor, weight: Tensor | None = None, sign: float = 1.0
    ) -> Tensor:
        """The heads [row, head, dim] of x, which stays."""
        ...


def rope_tail(x: Tensor, positions: Tensor, freq: Tensor, sign: float = 1.0) -> Tensor:
    """Turn adjacent pairs of the last 2 * len(freq) dims by positions * freq. x [row, ..., dim], positions [row]."""
    angle = positions.double()[:, None] * freq.double()
    shape = (len(positions), *[1] * (x.dim() - 2), len(freq))
    cos, sin = angle.cos().float().view(shape), (sign * angle.sin()).float().view(shape)
    n = 2 * len(freq)
    a, b = x[..., -n::2], x[..., -n + 1 :: 2]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., :-n], turned), -1)


def bind(spec: RopeTailSpec) -> RopeTail:
    def run(
        x: Tensor, positions: Tensor, freq: Tensor, weight: Tensor | None = None, sign: float = 1.0
    ) -> Tensor:
        if spec.normed:
            x = F.rms_norm(x, (spec.dim,), weight, spec.eps)
        return rope_tail(x, positions, freq, sign)

    return run
