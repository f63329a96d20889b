"""Work on what a slot holds, which the loop does between two rounds, once the slot is idle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspec.errors import PyspecError


@dataclass(frozen=True)
class Visit:
    """`do` runs on the engine's thread while nothing is in flight that touches the slot; `failed` hears if it can not, or does not."""

    slot: int
    do: Callable[[], None]
    failed: Callable[[PyspecError], None]
