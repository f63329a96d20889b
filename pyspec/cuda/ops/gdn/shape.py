"""State of a Gated DeltaNet layer for a slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class GdnShape:
    """Dimensions of one Gated DeltaNet layer. It records normalised keys, values, log decay and strength.

    grouped  value head h reads key head h // (n_v_head / n_k_head); otherwise key head h % n_k_head
    by_key   a head has a decay for each dimension of its keys (Kimi Delta Attention); otherwise one
    floor    log decays are at least this, as shares by a sigmoid; 0: they have no bound, and come by softplus
    """

    n_k_head: int
    n_v_head: int
    dim: int  # of keys and of values
    n_conv: int
    n_channel: int  # 2 * n_k_head * dim + n_v_head * dim
    grouped: bool = False
    by_key: bool = False
    floor: float = 0.0

    def of_heads(self, n_k_head: int, n_v_head: int) -> GdnShape:
        """The same with so many heads, as a rank has them."""
        n_channel = (2 * n_k_head + n_v_head) * self.dim
        return replace(self, n_k_head=n_k_head, n_v_head=n_v_head, n_channel=n_channel)

    def macros(self) -> dict[str, int | str]:
        """Of gdn.cuh, beside the numbers of heads."""
        macros: dict[str, int | str] = {"GROUPED": 1} if self.grouped else {}
        return macros | {"BY_KEY": 1, "FLOOR": f"{self.floor}f"} if self.by_key else macros

    @property
    def n_decay(self) -> int:
        """Decays of a value head."""
        return self.dim if self.by_key else 1

    @property
    def state(self) -> tuple[int, ...]:
        return self.n_v_head, self.dim, self.dim  # S[value, key]

    @property
    def records(self) -> Mapping[str, tuple[int, ...]]:
        k, v = (self.n_k_head, self.dim), (self.n_v_head, self.dim)
        g = v if self.by_key else (self.n_v_head,)
        return {"k": k, "v": v, "g": g, "beta": (self.n_v_head,)}
