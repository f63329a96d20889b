"""A round as data: what a device is told of one forward, in plain integers that could be sent to another process.

Every page is held and every index checked when it is planned, before anything is told to a device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pyspec.slots.batch import Seq
from pyspec.slots.table import SlotTable


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a round goes on from the one before, of which nobody has read the results.

    ends    per sequence, tokens behind which the device stops, for the host decides there; None: no row depends on it
    forced  per sequence, drafts of the round before that count as right (synthetic acceptance); None: those that are
    n_draft drafts made on the device for each sequence before it runs; empty: none
    refused rows of the round before whose tokens count as wrong, whatever is best: a grammar does not take them
    """

    ends: tuple[frozenset[int], ...] | None = None
    forced: tuple[int, ...] | None = None
    n_draft: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LogitsNeed:
    """What of a round's results somebody may look at besides each row's best token.

    logits  any of them
    bans    without them: tokens that no row may choose, so that the best one is the best of the others
    """

    logits: bool = True
    bans: tuple[int, ...] = ()


ALL = LogitsNeed()


@dataclass(frozen=True, slots=True)
class Round:
    """What a device runs, in plain integers.

    seqs    the rows of each slot, in order. Behind another round they stand as if nothing of that had been kept, with no tokens
    pages   [seq] of int64 [page]: the pages of each slot
    behind  None: positions and tokens are those of `seqs`
    reads   what is wanted of its results
    """

    seqs: tuple[Seq, ...]
    pages: tuple[NDArray[np.int64], ...] = field(compare=False)
    behind: Continuation | None = None
    reads: LogitsNeed = ALL

    @property
    def n_row(self) -> int:
        return sum(seq.width for seq in self.seqs)


def plan_round(
    table: SlotTable, seqs: Iterable[Seq], behind: Continuation | None = None, *, reads: LogitsNeed = ALL
) -> Round:
    """Hold pages for every row. Raises OutOfBounds, which names the slot, before anything is told to a device."""
    seqs = tuple(seqs)
    pages = tuple(table.reach(table.slots[q.slot], q.n_past, q.n_past + q.width + q.slack) for q in seqs)
    return Round(seqs, pages, behind, reads)
