"""What a chained drafter (chain.py) knows of a slot: the rows that are exact, and the hidden states of those that wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Pending:
    """A slot's state for its next draft: rows below n_row are exact; `hidden` [m, n_embd] holds h of positions n_row-1 .. n_past-1.

    Between a draft and the forward that verifies it the anchor's row is exact already: n_row is n_past + 1, and `hidden`
    still holds h of n_past-1, for the case that this forward fails and the draft has to be made again.

    Rounds without drafts only note the places of their rows; `hidden` brings them together.

    guess   tokens of the chained rows from n_row on, if they stay where they are right
    n_fold  last exact rows that recurrent layers have as records
    begun   length of the slot in the last `draft_ahead`
    """

    __slots__ = ("_pieces", "begun", "generation", "guess", "n_fold", "n_hidden", "n_row")

    def __init__(self, generation: int, n_row: int, hidden: Tensor) -> None:
        self.generation, self.n_row, self.hidden = generation, n_row, hidden
        self.guess: Sequence[int] = ()
        self.n_fold = self.begun = 0

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
