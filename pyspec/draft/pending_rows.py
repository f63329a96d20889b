"""What a chained drafter (chain.py) knows of a slot: the rows that are exact, and the hidden states of those that wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pyspec.slots.batch import Seq
from pyspec.slots.images import IMAGE, ImageSpan, handle_of, shift_before
from pyspec.slots.memory import Checkpoint


class PendingPictures:
    """Pictures among a slot's rows that wait, with their rows, and the shift of the text before them (`Seq.shift`)."""

    __slots__ = ("rows", "shift", "spans")

    def __init__(self) -> None:
        self.shift: int | None = None
        self.spans: tuple[ImageSpan, ...] = ()
        self.rows: dict[int, Tensor] = {}

    def hear(self, seq: Seq, sources: Mapping[int, Tensor], n_row: int) -> None:
        """Note those of rows that were observed. n_row: rows before it are computed."""
        done = [span for span in self.spans if span.end <= min(n_row, seq.n_past)]
        self.shift = seq.shift if self.shift is None else self.shift + sum(span.shift for span in done)
        new = [span for span in seq.images if span.handle in sources and span not in self.spans]
        self.spans = (*(span for span in self.spans if span not in done), *new)
        kept = {span.handle for span in self.spans}
        self.rows = {handle: x for handle, x in {**self.rows, **sources}.items() if handle in kept}

    def placed(self, seq: Seq) -> Seq:
        """The rows as the target has them. Those of a picture that was not observed read token 0."""
        if not self.spans and not self.shift:
            return seq
        end = seq.n_past + seq.width
        images = tuple(span for span in self.spans if span.first < end and span.end > seq.n_past)
        shift = (self.shift or 0) + shift_before(self.spans, seq.n_past)
        return replace(seq, shift=shift, images=images)


def without_pictures(seq: Seq, instead: int, known: Mapping[int, Tensor]) -> Seq:
    """The rows with a token in place of each row of a picture that is not known."""
    if max(seq.tokens, default=0) < IMAGE:
        return seq
    tokens = [instead if x >= IMAGE and handle_of(x) not in known else x for x in seq.tokens]
    return replace(seq, tokens=tokens)


class Pending:
    """A slot's state for its next draft: rows below n_row are exact; `hidden` [m, n_embd] holds h of positions n_row-1 .. n_past-1.

    Between a draft and the forward that verifies it the anchor's row is exact already: n_row is n_past + 1, and `hidden`
    still holds h of n_past-1, for the case that this forward fails and the draft has to be made again.

    Rounds without drafts only note the places of their rows; `hidden` brings them together.

    guess   tokens of the chained rows from n_row on, if they stay where they are right
    n_fold  last exact rows that recurrent layers have as records
    begun   length of the slot in the last `draft_ahead`
    beside  of one that was kept: the block's memory outside pages
    pictures  among its rows
    """

    __slots__ = (
        "_pieces",
        "begun",
        "beside",
        "generation",
        "guess",
        "n_fold",
        "n_hidden",
        "n_row",
        "pictures",
    )

    def __init__(self, generation: int, n_row: int, hidden: Tensor) -> None:
        self.generation, self.n_row, self.hidden = generation, n_row, hidden
        self.guess: Sequence[int] = ()
        self.n_fold = self.begun = 0
        self.beside: Checkpoint | None = None
        self.pictures = PendingPictures()

    @property
    def hidden(self) -> Tensor:
        """[m, n_embd], brought together on the first read."""
        if len(self._pieces) > 1:
            self.hidden = torch.cat([rows[first:end] for rows, first, end in self._pieces])
        rows, first, end = self._pieces[0]
        return rows[first:end]

    @hidden.setter
    def hidden(self, rows: Tensor) -> None:
        self.n_hidden = rows.shape[0]
        self._pieces = [(rows, 0, self.n_hidden)]

    def add(self, rows: Tensor, first: int, end: int, *, after: bool) -> None:
        """Rows [first, end) of a forward, after those that are there or in their place."""
        self._pieces = [*self._pieces, (rows, first, end)] if after else [(rows, first, end)]
        self.n_hidden = self.n_hidden * after + end - first
