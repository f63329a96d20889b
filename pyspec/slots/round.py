"""A round as data: one forward in plain integers, which could be sent to another process.

Planning holds every page and checks every index, before the device gets a command.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pyspec.errors import OutOfBounds
from pyspec.slots.batch import Seq
from pyspec.slots.table import SlotTable


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a round continues the one before, whose results are not read yet.

    ends    per sequence, tokens at which the device stops, because the host decides there; None: no row depends on it
    forced  per sequence, drafts of the round before that count as right (synthetic acceptance); None: compare them
    n_draft drafts that the device makes for each sequence before it runs; empty: none
    refused rows of the round before whose drafts count as wrong: a grammar refuses them
    known   the round before read one whole prompt and nothing else: the token that each sequence goes on with, NO_TOKEN for the prompt's,
            which only the device has. Rows are laid out one position before their places. None: the round before was a verify
    """

    ends: tuple[frozenset[int], ...] | None = None
    forced: tuple[int, ...] | None = None
    n_draft: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    known: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class LogitsNeed:
    """Which results of the round the host will read, besides each row's best token.

    logits  all of them
    bans    without logits: tokens that are excluded from the best ones
    """

    logits: bool = True
    bans: tuple[int, ...] = ()


ALL = LogitsNeed()


@dataclass(frozen=True, slots=True)
class Round:
    """A device's forward, in plain integers.

    seqs    the rows of each slot, in order. In a continuation, without tokens, and as if no row of the round before were kept
    pages   [seq] of int64 [page]: the pages of each slot
    behind  None: positions and tokens are those of `seqs`
    reads   results that the host will read
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
    """Hold pages for every row. Raises OutOfBounds, which names the slot, before the device gets a command."""
    seqs, most = tuple(seqs), table.n_chunk
    for q in seqs if most else ():
        if q.width + q.slack > most:
            raise OutOfBounds(f"slot {q.slot} rows of a forward", q.width + q.slack, most + 1, q.slot)
    pages = tuple(table.reach(table.slots[q.slot], q.n_past, q.n_past + q.width + q.slack) for q in seqs)
    return Round(seqs, pages, behind, reads)
