"""Commands of the first rank to the others, as plain integers. Each rank runs them in order (follow.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyspec.draft.drafter import DraftCommand
from pyspec.slots.batch import Seq
from pyspec.slots.round import ALL, Continuation, LogitsNeed


@dataclass(frozen=True, slots=True)
class RunForward:
    """A forward over these rows, in these pages.

    in_arena  a graph may hold it
    is_moved  the first rank's device has moved the rows since they were laid out: receive them from its memory
    moves     move the rows behind those that `AcceptRows` kept
    reads     gather the logits of all ranks; else the first rank gets each row's best token only
    absorbs   a divided drafter makes its context of the rows
    prompt    rows that a whole prompt is padded to, because the first rank has a graph of so many; 0: no such graph
    """

    seqs: tuple[Seq, ...]
    pages: tuple[NDArray[np.int64], ...]
    taps: tuple[int, ...]
    in_arena: bool = False
    is_moved: bool = False
    moves: bool = False
    reads: LogitsNeed = ALL
    absorbs: bool = False
    prompt: int = 0


@dataclass(frozen=True, slots=True)
class AcceptRows:
    """Count the kept rows of the last forward. All ranks have its best tokens, so they find the same."""

    behind: Continuation


@dataclass(frozen=True, slots=True)
class HeadBest:
    """Find the best tokens of `n_row` rows of the first rank, with each rank's part of the head."""

    n_row: int


@dataclass(frozen=True, slots=True)
class SealGraphs:
    """Capture no more graphs."""


@dataclass(frozen=True, slots=True)
class FoldSlot:
    """Fold `n_fold` recorded rows into the slot's state."""

    slot: int
    n_fold: int


@dataclass(frozen=True, slots=True)
class ResetSlot:
    """Start a new sequence in a slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class CopyPage:
    """Copy page `old` of every paged part to page `new`."""

    new: int
    old: int


@dataclass(frozen=True, slots=True)
class KeepState:
    """Take a checkpoint of a slot under this number."""

    number: int
    slot: int
    n_past: int


@dataclass(frozen=True, slots=True)
class RestoreState:
    """Restore this checkpoint into a slot."""

    number: int
    slot: int


@dataclass(frozen=True, slots=True)
class ReadPages:
    """Send these pages to the first rank."""

    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WritePages:
    """Receive these pages from the first rank."""

    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadState:
    """Send this checkpoint to the first rank."""

    number: int


@dataclass(frozen=True, slots=True)
class MakeState:
    """Receive a checkpoint from the first rank under this number."""

    number: int
    n_past: int


@dataclass(frozen=True, slots=True)
class DropStates:
    """Forget these checkpoints."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShowPicture:
    """Receive rows [n_row, width] f32 of a picture from the first rank: forwards will read them."""

    handle: int
    n_row: int
    width: int


@dataclass(frozen=True, slots=True)
class HidePictures:
    """Forget the rows of all pictures but these."""

    unread: frozenset[int]


OfPages = ResetSlot | CopyPage | ReadPages | WritePages
OfStates = KeepState | RestoreState | ReadState | MakeState | DropStates
OfPictures = ShowPicture | HidePictures
Command = (
    RunForward
    | AcceptRows
    | DraftCommand
    | HeadBest
    | SealGraphs
    | FoldSlot
    | OfPages
    | OfStates
    | OfPictures
)
