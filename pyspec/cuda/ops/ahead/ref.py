"""Reference of `ahead` in plain torch: inputs of a round that is launched before the host has read the previous one.

A verify keeps its first row and one more for each draft that is its row's best token, up to the first that may end the request
or is banned. There the host decides, and the slot's rows of the next round are discarded. `accept` counts the kept rows; `move` moves
a layout, which was made as if none had been kept, behind them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.faults import record
from pyspec.cuda.guard import Guard
from pyspec.slots.batch import Batch, SeqMode

GUARD = Guard(10)

MAX_ENDS = 16  # tokens of a sequence at which the host decides
NO_TOKEN = -1  # padding of `ends`


@dataclass(frozen=True, slots=True)
class AheadSpec:
    """Any number of rows and sequences.

    n_seq, n_row  most sequences and rows of a verify that the caller plans: `accept` has buffers for them from the start, and
                  allocates in the middle of a round for more
    """

    device: torch.device
    n_seq: int = field(default=0, compare=False, repr=False)  # a kernel that is right is right for all
    n_row: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Kept:
    """The kept rows of a verify, in its own order of sequences and rows. Valid until the next `accept`.

    n       [seq]  int32  rows
    tokens  [row]  int64  the token after each row; a valid but meaningless token after rows that are not kept
    last    [seq]  int64  the last row that is kept
    goes    [seq]  int32  1, or 0 if the token after that row is one of the ends
    """

    n: Tensor
    tokens: Tensor
    last: Tensor
    goes: Tensor


class Ahead(Protocol):
    """The launch that the op binds."""

    def accept(
        self, best: Tensor, batch: Batch, ends: Tensor | None = None, forced: Tensor | None = None
    ) -> Kept:
        """How far the verify that ran `batch` is kept.

        best    [2, row] f64    each row's best token and its value; every row of the batch has logits
        ends    [seq, MAX_ENDS] int32  tokens at which a sequence stops, padded with NO_TOKEN; none if not given
        forced  [seq] int32     drafts that count as right in any case (synthetic acceptance)
        """
        ...

    def move(self, batch: Batch, kept: Kept, drafts: Tensor | None = None) -> Batch:
        """Move the rows of `batch` behind the kept ones: positions, rows of keys and values, the range of keys they see.

        In place, but for the host's description where the host can read it. The batch has the sequences of the verify, laid out
        from its first positions with pages for all that may be kept; an `n_fold` of 1 becomes the number of kept rows (after a single row it stays),
        `keep` is taken back where an end follows them. Each sequence's first row gets the token that follows them, the others their
        drafts, if there are any [seq, n] int64.
        """
        ...

    def follow(self, batch: Batch, kept: Kept) -> None:
        """Give the rows of `batch` the tokens that follow the verify's rows, one for one; `out_rows` are the last kept."""
        ...

    def step(self, batch: Batch) -> Batch:
        """Move all rows on by one position, in place as `move`."""
        ...


def n_kept(
    drafts: Sequence[int], best: Sequence[int], ends: Collection[int], forced: int | None = None
) -> int:
    """The rule of `accept` for one sequence. best: of each row, one more than drafts."""
    n = 0
    while (
        n < len(drafts)
        and drafts[n] not in ends
        and (drafts[n] == best[n] if forced is None else n < forced)
    ):
        n += 1
    return n + 1


def moved(b: Batch) -> tuple[Tensor, ...]:
    """What kernels that move a batch read and write of it, in their order."""
    layout = b.tokens, b.positions, b.rope_at, b.kv_rows, b.hi, b.out_rows, b.seq_fold, b.seq_keep
    return *layout, b.seq_start, b.row_seq, b.page_table


class Buffers:
    """Memory for the results of `accept`, of so many sequences and rows as were planned; more take new memory."""

    def __init__(self, spec: AheadSpec) -> None:
        self.device = spec.device
        self._make(spec.n_seq, spec.n_row)

    def _make(self, n_seq: int, n_row: int) -> None:
        self.n = torch.ones(n_seq, dtype=torch.int32, device=self.device)
        self.goes = torch.ones(n_seq, dtype=torch.int32, device=self.device)
        self.last = torch.zeros(n_seq, dtype=torch.int64, device=self.device)
        self.tokens = torch.zeros(n_row, dtype=torch.int64, device=self.device)

    def room(self, best: Tensor, batch: Batch, ends: Tensor | None) -> Kept:
        """For the results of this batch. Asserts what kernels rely on."""
        n_seq, n_row = len(batch.seqs), batch.n_row
        if n_seq > len(self.n) or n_row > len(self.tokens):  # graphs do not hold these buffers
            self._make(max(n_seq, len(self.n)), max(n_row, len(self.tokens)))
        assert best.dtype == torch.float64
        assert ends is None or (ends.dtype == torch.int32 and ends.is_contiguous())
        assert ends is None or ends.shape == (n_seq, MAX_ENDS)
        return Kept(self.n[:n_seq], self.tokens[:n_row], self.last[:n_seq], self.goes[:n_seq])


class IntoBuffers(ABC):
    """Implements `Ahead` by kernels, with result buffers of its own, because two engines may share a stream."""

    def __init__(self, spec: AheadSpec) -> None:
        self.buffers, self.fault = Buffers(spec), record(spec.device)

    @abstractmethod
    def _launch(self, batch: Batch, kept: Kept | None, drafts: Tensor | None, *, moves: bool) -> None:
        """Give rows the tokens that follow, and move them if they are moved."""

    def move(self, batch: Batch, kept: Kept, drafts: Tensor | None = None) -> Batch:
        self._launch(batch, kept, drafts, moves=True)
        return batch

    def follow(self, batch: Batch, kept: Kept) -> None:
        self._launch(batch, kept, None, moves=False)

    def step(self, batch: Batch) -> Batch:
        self._launch(batch, None, None, moves=True)
        return batch

    def _sizes(self, batch: Batch, kept: Kept | None, drafts: Tensor | None) -> tuple[int, ...]:
        """Steps and number of drafts; rows, sequences, rows of the verify, pages."""
        steps, n_draft = ((0, 0), 0) if drafts is None else (drafts.stride(), drafts.shape[1])
        (n_seq, n_page), n_next = batch.page_table.shape, 0 if kept is None else len(kept.tokens)
        return *steps, n_draft, len(batch.positions), n_seq, n_next, n_page


class TorchAhead:
    """Implements `Ahead`."""

    def accept(
        self, best: Tensor, batch: Batch, ends: Tensor | None = None, forced: Tensor | None = None
    ) -> Kept:
        n_seq, n_row = len(batch.seqs), batch.n_row
        tokens, starts = batch.tokens[:n_row], batch.seq_start[: n_seq + 1].long()
        seq, row = batch.row_seq[:n_row].long(), torch.arange(n_row, device=tokens.device)
        found, draft = best[0, :n_row].long(), tokens.roll(-1)
        right = found == draft if forced is None else row - starts[seq] < forced[seq]
        if ends is not None:
            right = right & (ends[seq] != draft[:, None]).all(1)
        stops = torch.where(right & (row + 1 < starts[seq + 1]), n_row, row)
        last = torch.full((n_seq,), n_row, device=tokens.device).scatter_reduce(0, seq, stops, "amin")
        n, goes = (last - starts[:-1] + 1).int(), torch.ones_like(last, dtype=torch.int32)
        if ends is not None:
            goes = (ends != found[last][:, None]).all(1).int()
        return Kept(n, torch.where(row < last[seq], draft, found), last, goes)

    def move(self, batch: Batch, kept: Kept, drafts: Tensor | None = None) -> Batch:
        n_seq, n_row = len(batch.seqs), batch.n_row
        seq = batch.row_seq[:n_row].long()
        self._shift(batch, kept.n[seq].long())
        batch.seq_fold[:n_seq] *= kept.n[:n_seq]
        keep = batch.seq_keep[:n_seq]
        keep.copy_(torch.where(keep == SeqMode.KEEP, kept.goes[:n_seq], keep))
        place = torch.arange(n_row, device=seq.device) - batch.seq_start[seq].long()
        first = kept.tokens[kept.last[seq]]
        others = (
            batch.tokens[:n_row]
            if drafts is None
            else drafts[seq, (place - 1).clamp(0, drafts.shape[1] - 1)]
        )
        batch.tokens[:n_row] = torch.where(place == 0, first, others)
        return described(batch)

    def follow(self, batch: Batch, kept: Kept) -> None:
        batch.tokens[: batch.n_row] = kept.tokens[: batch.n_row]
        batch.out_rows[: len(batch.seqs)] = kept.last

    def step(self, batch: Batch) -> Batch:
        self._shift(batch, 1)
        return described(batch)

    def _shift(self, batch: Batch, by: Tensor | int) -> None:
        """by: one number for all rows, or one for each row of a sequence. Padding rows stay, because a replayed graph may find rows there."""
        size, positions = batch.page_size, batch.positions
        is_row = batch.row_seq >= 0
        seq = batch.row_seq.long().clamp(min=0)
        if isinstance(by, Tensor):
            by = F.pad(by, (0, len(positions) - len(by)))
        moved = positions + by
        page = (moved // size).clamp(max=batch.page_table.shape[1] - 1)
        batch.kv_rows.copy_(
            torch.where(is_row, batch.page_table[seq, page] * size + moved % size, batch.kv_rows)
        )
        batch.hi.copy_(torch.where(is_row, batch.hi + by, batch.hi))
        batch.rope_at.copy_(torch.where(is_row, batch.rope_at + by, batch.rope_at))
        positions.copy_(torch.where(is_row, moved, positions))


def described(batch: Batch) -> Batch:
    """With the host's description of where its rows have moved, where the host can read that."""
    if batch.tokens.device.type != "cpu":
        return batch
    tokens, positions, hi, folds, keeps = (
        t.tolist() for t in (batch.tokens, batch.positions, batch.hi, batch.seq_fold, batch.seq_keep)
    )
    seqs, max_hi = [], []
    for q, first, end, fold, keep in zip(
        batch.seqs, batch.starts, batch.starts[1:], folds, keeps, strict=False
    ):
        own = tokens[first:end]
        mode = SeqMode(keep) if keep in (SeqMode.KEEP, SeqMode.LATE) else SeqMode.VERIFY
        seqs.append(replace(q, n_past=positions[first], tokens=own, mode=mode, n_fold=fold, slack=0))
        max_hi.append(max(hi[first:end]))
    return replace(batch, seqs=seqs, max_hi=max_hi)


def bind(spec: AheadSpec) -> TorchAhead:
    return TorchAhead()
