"""What the op `hadamard` is bound with."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class HadamardSpec:
    """Heads of `dim` dims, of which every `n`, a power of two, are turned together."""

    device: torch.device
    dim: int
    n: int
