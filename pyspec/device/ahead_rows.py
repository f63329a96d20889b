"""Counts the rows that a verify keeps on the device, before the host has read its results. Every rank finds the same."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pyspec.cuda.ops.ahead.op import ahead
from pyspec.cuda.ops.ahead.ref import MAX_ENDS, NO_TOKEN, AheadSpec, Kept
from pyspec.slots.batch import Batch, sent
from pyspec.slots.round import Continuation


class AheadRows:
    """The op `ahead` with the arguments of a round that continues another one. n_row: rows of the largest verify, for its buffers."""

    def __init__(self, device: torch.device, n_seq: int, n_row: int) -> None:
        self.device = device
        self.ahead = ahead.bind(AheadSpec(device, n_seq=n_seq, n_row=n_row))
        # of sequences that go on with one token each
        self._ones = torch.ones(n_seq, dtype=torch.int32, device=device)
        self._places = torch.arange(n_seq, device=device)
        # `ends` of rounds, and the same on the device
        self._ends: tuple[tuple[frozenset[int], ...], Tensor] = ((), torch.empty(0))

    def accept(self, batch: Batch, best: Tensor, behind: Continuation) -> Kept:
        """How far the verify that ran `batch` is kept. best [2, row] f64: as of the op, of a prompt its last row alone."""
        if behind.known is not None:
            return self._given(best, behind.known)
        ends = None if behind.ends is None else self._upload_ends(behind.ends)
        forced = None
        if behind.forced is not None:
            forced = sent(torch.tensor(behind.forced, dtype=torch.int32), self.device)
        return self.ahead.accept(best, self._crossed(batch, behind.refused), ends, forced)

    def _given(self, best: Tensor, known: tuple[int, ...]) -> Kept:
        """One row of each sequence, as if they were a verify without drafts: the token behind it is known, or the prompt's best one."""
        tokens = sent(torch.tensor(known, dtype=torch.int64), self.device)
        tokens = torch.where(tokens == NO_TOKEN, best[0, 0].long(), tokens)
        n = len(known)
        return Kept(self._ones[:n], tokens, self._places[:n], self._ones[:n])

    def move(self, batch: Batch, kept: Kept, drafts: Tensor | None = None) -> Batch:
        """As of the op."""
        return self.ahead.move(batch, kept, drafts)

    def _crossed(self, batch: Batch, refused: tuple[int, ...]) -> Batch:
        """A copy of the batch with an impossible token in these rows. The batch's own tokens serve as ids elsewhere."""
        if not refused:
            return batch
        rows = sent(torch.tensor(refused, dtype=torch.int64), self.device)
        return replace(batch, tokens=batch.tokens.index_fill(0, rows, NO_TOKEN))

    def _upload_ends(self, ends: tuple[frozenset[int], ...]) -> Tensor:
        """[seq, MAX_ENDS] on the device; the same for many rounds."""
        if self._ends[0] != ends:
            rows = [[*own, *[NO_TOKEN] * (MAX_ENDS - len(own))] for own in map(sorted, ends)]
            self._ends = ends, sent(torch.tensor(rows, dtype=torch.int32), self.device)
        return self._ends[1]
