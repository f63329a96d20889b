"""One of several processes that run a model together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the `n` processes that run a model together; the first one decides."""

    index: int = 0
    n: int = 1

    @property
    def leads(self) -> bool:
        return self.index == 0
