"""cos and sin of every row's rope angles. Reference in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AnglesSpec:
    """For any number of rows and angles, so all ropes of a process share one launch."""

    device: torch.device


Angles = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""The launch that the op binds, as `angles`."""


def angles(positions: Tensor, freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """cos, sin [row, 1, n] f32 of position / factor * freq. positions [row] int64, freq [n] f32."""
    theta = (positions[:, None] if factor == 1.0 else positions[:, None].float() / factor) * freq
    return theta.cos()[:, None], theta.sin()[:, None]


def bind(spec: AnglesSpec) -> Angles:
    return angles
