"""State of a Mamba-2 layer for a slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """Dimensions of one Mamba-2 layer. It records inputs, their directions (B), decay and step."""

    n_head: int
    head_dim: int
    n_group: int  # heads of a group share B and C
    n_state: int
    n_conv: int

    def share(self, n: int) -> Mamba2Shape:
        """Of each of `n` ranks, which have whole groups: where those do not divide, the last ranks have groups of zeros."""
        n_group = -(-self.n_group // n)
        return replace(self, n_head=n_group * (self.n_head // self.n_group), n_group=n_group)

    def macros(self) -> dict[str, int | str]:
        """Of mamba2.cu and mamba2_chunk.cu."""
        return {
            "HEADS": self.n_head,
            "DIM": self.head_dim,
            "GROUPS": self.n_group,
            "N_STATE": self.n_state,
        }

    @property
    def n_channel(self) -> int:
        return self.n_head * self.head_dim + 2 * self.n_group * self.n_state

    @property
    def state(self) -> tuple[int, ...]:
        return self.n_head, self.head_dim, self.n_state

    @property
    def records(self) -> Mapping[str, tuple[int, ...]]:
        x, b = (self.n_head, self.head_dim), (self.n_group, self.n_state)
        return {"x": x, "b": b, "decay": (self.n_head,), "dt": (self.n_head,)}
