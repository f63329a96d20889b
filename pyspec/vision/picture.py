"""A picture that is ready to be encoded, and its place in a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # help is printed without numpy
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """Pixels of the size that the encoder takes.

    digest  SHA-256 of the pixels, their size and the projector's digest: equal digests give equal rows
    pixels  [height, width, 3] uint8
    nx, ny  columns and rows of its tokens
    n_row   rows that it gives to a prompt: nx ny, and breaks where the encoder makes them
    """

    digest: bytes
    pixels: NDArray[np.uint8]
    nx: int
    ny: int
    n_row: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A picture in a prompt. first: the number of its first row among the prompt's ids; its ids there are those of `slots.images`."""

    picture: Picture
    first: int
