"""Candidate draft lengths of one round: rows that drafts may add to a verify, and the best number of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

OFFERED = -1  # in place of a position in a draft

Floats = NDArray[np.float64]


class DraftRows(NamedTuple):
    """Candidate rows: slot, position in the draft (OFFERED: needs no drafter), and chance to be right."""

    slot: NDArray[np.int64]
    place: NDArray[np.int64]
    gain: Floats

    def up_to(self, depth: int) -> DraftRows:
        mask = self.place < depth
        return self if mask.all() else DraftRows(self.slot[mask], self.place[mask], self.gain[mask])

    def best(self, busy: int, verify: Floats, draft: Floats, price: float = 0.0) -> Way:
        """Take the number of rows with most tokens per millisecond, or with most left once milliseconds are paid at `price` tokens each.

        verify: by extra rows, from one on; draft: by drafting slots, from none on
        """
        if not len(self.slot):
            return NO_WAY
        tokens = busy + self.gain.cumsum()
        ms = verify[: len(self.slot)] + draft[(self.place == 0).cumsum()]
        worth = tokens - price * ms if price else tokens / ms
        n = int(worth.argmax())
        return Way(
            float(worth[n]),
            float(tokens[n]),
            float(ms[n]),
            self.slot[: n + 1],
        )


class Way(NamedTuple):
    """A candidate choice: expected tokens per millisecond (or those left of a price), tokens, milliseconds, and each row's slot."""

    worth: float
    tokens: float
    ms: float
    slot: NDArray[np.int64]


NO_WAY = Way(float("-inf"), 0.0, 0.0, np.zeros(0, np.int64))


def more_rows(rows: DraftRows, busy: int) -> range:
    """Rows of verifies with one to all of the candidates."""
    return range(busy + 1, busy + 1 + len(rows.slot))
