"""What the op `attend` is bound with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pyspec.slots.kv_types import PLAIN, KvFormat


@dataclass(frozen=True, slots=True)
class AttendSpec:
    """`kv` is the pool's format (slots.kv); with `has_sinks` every call has them.

    cap      scores are cap * tanh(score / cap) before the mask; 0: as they are
    n_value  keys are the values, too: that many of their first dims. 0: values stand apart, and are as wide
    scattered  pages hold one key each (op `seen_pages`)
    """

    device: torch.device
    n_head: int
    n_kv_head: int
    head_dim: int
    scale: float
    kv: KvFormat = PLAIN
    has_sinks: bool = False
    n_value: int = 0
    cap: float = 0.0
    scattered: bool = False

    @property
    def value_dim(self) -> int:
        """Dims of a value."""
        return self.n_value or self.head_dim
