"""State of a gated short convolution for a slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ShortConvShape:
    """Dimensions of one layer. Its window is all that it remembers, and a verify's raw inputs lie behind it, so it records nothing else."""

    n_channel: int
    n_conv: int

    def of_channels(self, n: int) -> ShortConvShape:
        """The same with so many channels, as a rank has them."""
        return replace(self, n_channel=n)

    @property
    def state(self) -> tuple[int, ...]:
        return (1,)  # unused: every layer's memory has one

    @property
    def records(self) -> Mapping[str, tuple[int, ...]]:
        return {}
