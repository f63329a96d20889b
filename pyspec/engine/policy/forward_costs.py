"""What forwards with prompts cost, by rows. Arithmetic only: no torch, and no clock of its own."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

N_SAMPLE = 5  # forwards of a size that costs are taken from
FAR = 1000.0  # factor beyond the largest forward that was measured

Floats = NDArray[np.float64]


class ForwardCosts:
    """Milliseconds of forwards that read prompts, by rows: medians of the last ones of a size, and straight lines between sizes.

    A forward has a fixed part, which is large on a GPU, where it is no graph. What is smaller than all that was measured counts as if half of
    the smallest were fixed; what is larger, as if nothing were.
    """

    def __init__(self) -> None:
        self._last: dict[int, deque[tuple[int, float]]] = {}  # by size class: rows and milliseconds
        self._curve: tuple[Floats, Floats] | None = None

    def add(self, n_row: int, ms: float) -> None:
        """A forward of so many rows took so long, its wait for the results included."""
        self._last.setdefault(size_class(n_row), deque(maxlen=N_SAMPLE)).append((n_row, ms))
        self._curve = None

    @property
    def is_known(self) -> bool:
        return bool(self._last)

    @property
    def curve(self) -> tuple[Floats, Floats]:
        """Rows, from 0 to more than any forward has, and milliseconds, which never fall."""
        if self._curve is None:
            medians = [np.median(np.array(last), axis=0) for _, last in sorted(self._last.items())]
            rows, ms = np.array(medians).T
            rows = np.concatenate(([0.0], rows, [FAR * rows[-1]]))
            ms = np.concatenate(([ms[0] / 2], ms, [FAR * ms[-1]]))
            self._curve = rows, np.maximum.accumulate(ms)
        return self._curve

    def ms(self, n_row: Floats) -> Floats:
        """Of forwards of so many rows."""
        return np.interp(n_row, *self.curve)

    def least_ms(self, n_row: int) -> float:
        """Of a forward of so many rows, at least: what is smaller than all that was measured counts as if nothing were fixed, what is larger
        as if it took no longer, and no size takes longer than a larger one."""
        medians = np.array([np.median(np.array(last), axis=0) for _, last in sorted(self._last.items())])
        rows, ms = medians.T
        ms = np.minimum.accumulate(ms[::-1])[::-1]
        return float(np.interp(n_row, np.append(0.0, rows), np.append(0.0, ms)))

    def rows(self, ms: float) -> int:
        """Most rows of a forward that takes no longer."""
        rows, took = self.curve
        at = int(np.searchsorted(took, ms, side="right"))
        if at == len(rows):
            return int(rows[-1])
        if not at:
            return 0
        share = (ms - took[at - 1]) / (took[at] - took[at - 1])
        return int(rows[at - 1] + share * (rows[at] - rows[at - 1]))


def size_class(n_row: int) -> int:
    """Rows that are measured together: two classes an octave."""
    return int(2 * math.log2(max(n_row, 1)))
