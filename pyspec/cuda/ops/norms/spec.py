"""What the op `norms` is bound with."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class NormsSpec:
    """Rows of n columns. layer: LayerNorm without a bias, otherwise RMSNorm."""

    device: torch.device
    n: int
    eps: float
    layer: bool = False
