"""cos and sin of every row's rope angles. Reference in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AnglesSpec:
    """For any number of rows and angles, so all ropes of a process share one launch."""

    device: torch.device


class Angles(Protocol):
    """The launch that the op binds."""

    def __call__(self, positions: Tensor, freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """cos, sin [row, 1, n] f32 of position / factor * freq. positions [row] int64, freq [n] f32."""
        ...


def angles(positions: Tensor, freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    theta = (positions[:, None] if factor == 1.0 else positions[:, None].float() / factor) * freq
    return theta.cos()[:, None], theta.sin()[:, None]


def bind(spec: AnglesSpec) -> Angles:
    return angles
