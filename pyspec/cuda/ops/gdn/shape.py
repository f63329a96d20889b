"""State of a Gated DeltaNet layer for a slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class GdnShape:
    """Dimensions of one Gated DeltaNet layer. It records normalised keys, values, log decay and strength.

    grouped  value head h reads key head h // (n_v_head / n_k_head); otherwise key head h % n_k_head
    """

    n_k_head: int
    n_v_head: int
    dim: int  # of keys and of values
    n_conv: int
    n_channel: int  # 2 * n_k_head * dim + n_v_head * dim
    grouped: bool = False

    def of_heads(self, n_k_head: int, n_v_head: int) -> GdnShape:
        """The same with so many heads, as a rank has them."""
        n_channel = (2 * n_k_head + n_v_head) * self.dim
        return replace(self, n_k_head=n_k_head, n_v_head=n_v_head, n_channel=n_channel)

    def macros(self) -> dict[str, int | str]:
        """Of gdn.cuh, beside the numbers of heads."""
        return {"GROUPED": 1} if self.grouped else {}

    @property
    def state(self) -> tuple[int, ...]:
        return self.n_v_head, self.dim, self.dim  # S[value, key]

    @property
    def records(self) -> Mapping[str, tuple[int, ...]]:
        k, v = (self.n_k_head, self.dim), (self.n_v_head, self.dim)
        return {"k": k, "v": v, "g": (self.n_v_head,), "beta": (self.n_v_head,)}
