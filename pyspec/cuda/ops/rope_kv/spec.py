"""What the op `rope_kv` is bound with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pyspec.slots.kv_types import PLAIN, KvFormat


@dataclass(frozen=True, slots=True)
class RopeKvSpec:
    """n_q may be 0: keys and values alone; n_kv may be: queries alone.

    neox          pairs (d, d + n_rot/2), otherwise (2d, 2d + 1)
    kv            the pool's format
    norms_v       values are normed, without weights
    keys_are_values  values are the products of keys, before their norm and rope
    norm_behind   heads of q and k are normed behind the rope, and not before it; without weights where has_norm is False
    """

    device: torch.device
    n_q: int
    n_kv: int
    dim: int
    n_rot: int
    neox: bool
    gated: bool
    has_norm: bool
    eps: float
    kv: KvFormat = PLAIN
    norms_v: bool = False
    keys_are_values: bool = False
    norm_behind: bool = False

    @property
    def step(self) -> int:
        """Columns from one query to the next."""
        return self.dim * (2 if self.gated else 1)

    @property
    def n_column(self) -> int:
        """Of y."""
        return self.n_q * self.step + (1 if self.keys_are_values else 2) * self.n_kv * self.dim
