"""The layout of one forward: the rows of each slot, and the places of their keys and values.

`lay_out` is the only builder, for target and drafters, prompt chunks and verifies, with graphs and without, so that captured and
direct forwards can not differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyspec.errors import OutOfBounds
from pyspec.slots.arena import ROW64, SEQ32, Arena, Layout, PictureMemory
from pyspec.slots.images import IMAGE, ImageSpan, handle_of, index_of
from pyspec.slots.table import SlotTable


class SeqMode(IntEnum):
    """What becomes of a sequence's rows. Kernels get the number in seq_keep (seq.cuh)."""

    VERIFY = 0
    """Rows may be refused: they are recorded, and the state stays before them (deferred commit)."""
    KEEP = 1
    """Every row is final (prompt chunk, undrafted token): recurrent state is stored after them."""
    LATE = 3
    """Every row is final, but the state is not stored: they are recorded behind the n_fold ones, and the next forward folds all of
    them. Every forward reads the state, but not every forward has to write it."""


@dataclass(frozen=True, slots=True)
class Seq:
    """One slot's rows in a forward.

    n_past  tokens of the slot before these rows; the first row has this position
    mode    what becomes of the rows
    n_out   trailing rows that need logits
    n_fold  recorded rows of the slot to fold into its state before these rows
    slack   the rows may move on by this many positions before they run (op `ahead`): pages are held for that
    first_key  the rows see no position below it, besides their own; it stays where the rows move on
    shift   rows less positions of a text row at n_past (`images.shift_before` there), where positions have three axes (M-RoPE); where the rows
            move on, of the place that they reach
    images  pictures that have rows among these, in order
    """

    slot: int
    n_past: int
    tokens: Sequence[int]
    mode: SeqMode = SeqMode.VERIFY
    n_out: int = 0
    n_fold: int = 0
    slack: int = 0
    first_key: int = 0
    shift: int = 0
    images: tuple[ImageSpan, ...] = ()

    @property
    def width(self) -> int:
        return len(self.tokens)

    @property
    def keep(self) -> bool:
        return self.mode is SeqMode.KEEP

    @property
    def late(self) -> bool:
        return self.mode is SeqMode.LATE

    def n_recorded(self, n_kept: int) -> int:
        """Records of the slot that wait to be folded behind `n_kept` of these rows."""
        if self.keep:
            return 0
        return n_kept + self.n_fold if self.late else n_kept


@dataclass(frozen=True, slots=True)
class PictureRows:
    """Rows of pictures in a batch. It lies in no arena, besides a single prompt where the arena has memory for them (`Arena.see`): every batch
    of a graph of prompts has these fields there, also a text, in which no row is a picture's.

    is_row  [row, 1]      bool   which rows they are
    axes    [3, row]      int64  their positions by time, row and column, for ropes of three axes
    rows    [row, width]  f32    as the encoder made them: the model's width, and behind it parts of later blocks. None: nobody has sent them yet
    seen    [row]         int64  `Batch.hi`, where rows of a picture see all of it
    sources  the pictures whole, by handle, for those who observe the batch and compute some of these rows later
    ahead  on the host: most rows that one sees behind itself by that
    """

    is_row: Tensor
    axes: Tensor
    rows: Tensor | None
    seen: Tensor
    ahead: int
    sources: Mapping[int, Tensor]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of all sequences, one after another, without padding.

    seqs        the host's description, in row order
    starts      first row of each sequence, and the number of rows at the end
    tokens      [row]        int64  0 for rows of pictures
    positions   [row]        int64  absolute, also the rope position
    rope_at     [row]        int64  by which text turns in ropes of three axes: positions less `Seq.shift`
    kv_rows     [row]        int64  where the row's K and V are written
    page_table  [seq, page]  int64  pages of each sequence, padded with its first page
    lo, hi      [row]        int64  the row attends to positions lo <= p < hi
    out_rows    [out]        int64  rows that need logits

    For kernels, which see no host lists:
    seq_slot    [seq]        int32  slot of each sequence
    seq_start   [seq + 1]    int32  as `starts`
    seq_fold    [seq]        int32  n_fold
    seq_keep    [seq]        int32  SeqMode
    row_seq     [row]        int32  sequence of each row
    """

    seqs: Sequence[Seq]
    starts: Sequence[int]
    tokens: Tensor
    positions: Tensor
    rope_at: Tensor
    kv_rows: Tensor
    page_table: Tensor
    lo: Tensor
    hi: Tensor
    out_rows: Tensor
    seq_slot: Tensor
    seq_start: Tensor
    seq_fold: Tensor
    seq_keep: Tensor
    row_seq: Tensor
    page_size: int
    max_hi: Sequence[int]  # per sequence, on the host: upper bound of its rows' `hi`
    causal: bool  # rows see earlier rows and themselves
    ahead: int = 0  # most rows that one sees behind itself, of a batch in which only rows of pictures do
    pictures: PictureRows | None = None
    bucket: int | None = None  # rows with padding, if the fields lie in an arena
    pages: Sequence[NDArray[np.int64]] = ()  # per sequence, on the host: as in page_table
    prompt: bool = False  # in an arena, one whole prompt alone: only the device knows its number of rows
    single: bool = False  # the forward has one row a sequence, so no drafts; `seqs` may have only some of its sequences

    @property
    def n_row(self) -> int:
        return self.starts[-1]

    def seeing_pictures(self) -> Batch:
        """The same where each row of a picture sees all of it. OutOfBounds for one that has rows behind these."""
        if self.pictures is None:
            return self
        for seq in self.seqs:
            for image in seq.images:
                if image.end > seq.n_past + seq.width:
                    what = f"slot {seq.slot} rows up to the end of a picture that is seen both ways"
                    raise OutOfBounds(what, image.end - seq.n_past, seq.width + 1, seq.slot)
        return replace(self, hi=self.pictures.seen, causal=False, ahead=self.pictures.ahead)

    @property
    def n_place(self) -> int:
        """Sequences with padding: kernels run for all of them."""
        return self.seq_slot.shape[0]


def lay_out(
    table: SlotTable,
    seqs: Sequence[Seq],
    device: torch.device,
    *,
    see_block: bool = False,
    arena: Arena | None = None,
    pages: Sequence[NDArray[np.int64]] | None = None,
    first_key: int = 0,
    sees_own: bool = True,
    pictures: Mapping[int, Tensor] | None = None,
) -> Batch:
    """Build the batch for `seqs`; grows the slots' pages and checks every index on the host.

    first_key: of all sequences at least, as `Seq.first_key`.
    pages: those of each sequence, if they are held already (`SlotTable.reach`).
    sees_own: rows see themselves, besides the rows before; otherwise the first of a slot's tokens is seen all the same.
    see_block: rows see all rows of their own sequence, later ones too (a drafter's fill-in block); otherwise causal.
    arena: put it there, padded to a bucket, if it fits; see `Batch.bucket`. With rows of pictures only one that has memory for them.
    pictures: rows [n_row, width] f32 of the encoder by handles, on the device. None: others send them (`PictureRows.rows`).
    """
    starts = [0]
    for seq in seqs:
        n = seq.width
        if not 0 <= seq.n_out <= n:
            raise OutOfBounds(f"slot {seq.slot} logits rows", seq.n_out, n + 1, seq.slot)
        starts.append(starts[-1] + n)
    if pages is None:
        pages = [table.reach(table.slots[q.slot], q.n_past, q.n_past + q.width + q.slack) for q in seqs]
    ends = [seq.n_past + seq.width for seq in seqs]
    layout, n_out = _write(table, seqs, starts, ends, pages, see_block)
    if not sees_own:
        np.maximum(layout.rows[ROW64.index("positions")], 1, out=layout.rows[ROW64.index("hi")])
    first_keys = [max(first_key, seq.first_key) for seq in seqs]
    if any(first_keys):
        of_rows = np.repeat(first_keys, [seq.width for seq in seqs])
        layout.rows[ROW64.index("lo")] = np.minimum(layout.rows[ROW64.index("positions")], of_rows)
    found = _find_pictures(layout, seqs, starts) if any(seq.images for seq in seqs) else None
    if arena is not None and found is not None and arena.shown is None:
        arena = None
    bucket = None if arena is None or found is not None else arena.bucket([seq.width for seq in seqs])
    prompt = bucket is None and arena is not None and not see_block and _is_prompt(seqs)
    if arena is not None and prompt:
        bucket = arena.prompt_bucket(starts[-1])
    if arena is not None and bucket is not None and max(map(len, pages), default=0) <= arena.n_page:
        assert arena.memory.device.type == device.type, "kernels read where the arena is"
        fields = arena.fill(layout, bucket, table.null_row, n_out=n_out, prompt=prompt)
    else:
        bucket, fields = None, _fresh(layout, n_out, device)
    causal, size, single = not see_block, table.page_size, starts[-1] == len(seqs)
    max_hi = [end + seq.slack for end, seq in zip(ends, seqs, strict=True)]
    about: dict[str, Any] = {**fields, "max_hi": max_hi, "causal": causal, "bucket": bucket}
    about |= {"pages": pages, "single": single, "prompt": prompt and bucket is not None}
    shown = arena.shown if arena is not None and about["prompt"] else None
    if found is not None:
        about["pictures"] = _upload_pictures(found, seqs, starts[-1], device, pictures, shown, bucket)
    elif shown is not None:
        shown.clear()
        about["pictures"] = _of_arena(shown, fields["hi"])
    return Batch(seqs=seqs, starts=starts, page_size=size, **about)


def _is_prompt(seqs: Sequence[Seq]) -> bool:
    """One whole prompt from its first token on that needs the last row's logits."""
    return (
        len(seqs) == 1
        and seqs[0].keep
        and not seqs[0].n_past
        and not seqs[0].n_fold
        and seqs[0].n_out == 1
    )


def _write(
    table: SlotTable,
    seqs: Sequence[Seq],
    starts: Sequence[int],
    ends: Sequence[int],
    pages: Sequence[NDArray[np.int64]],
    see_block: bool,
) -> tuple[Layout, int]:
    """The layout, and its number of rows with logits."""
    slots = [q.slot for q in seqs]
    folds = [q.n_fold for q in seqs]
    keeps = [int(q.mode) for q in seqs]  # numpy converts plain integers faster
    per_seq = np.array([[*slots, 0], [*folds, 0], [*keeps, 0], starts], dtype=np.int32)
    widths = np.array([q.width for q in seqs], dtype=np.int64)
    before = [q.n_past - start for q, start in zip(seqs, starts, strict=False)]
    first_out = [end - q.n_out for q, end in zip(seqs, starts[1:], strict=True)]
    per_row = np.array([list(range(len(seqs))), before, first_out, ends], dtype=np.int64).repeat(
        widths, axis=1
    )
    row_seq, n_before, first_out_row, end = per_row
    row = np.arange(starts[-1])
    out_rows = (row >= first_out_row).nonzero()[0]
    rows = np.zeros((len(ROW64), len(row)), dtype=np.int64)
    tokens, positions, kv_rows, hi, _, out, rope_at = rows
    tokens[:] = [token for seq in seqs for token in seq.tokens]
    positions[:] = row + n_before
    rope_at[:] = positions
    if any(q.shift for q in seqs):
        rope_at -= np.repeat([q.shift for q in seqs], widths)
    kv_rows[:] = table.rows_of(pages, widths, positions)
    hi[:] = end if see_block else positions + 1
    out[: len(out_rows)] = out_rows
    return Layout(rows, row_seq, per_seq, pages), len(out_rows)


_Found = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Ids and rows of pictures in a batch, the axes [3, row] of all rows, and `PictureRows.seen`."""


def _find_pictures(layout: Layout, seqs: Sequence[Seq], starts: Sequence[int]) -> _Found | None:
    """Rows of pictures, if there are some. Their tokens become 0, and text behind them goes on where they say."""
    tokens, positions, hi, rope_at = (
        layout.rows[ROW64.index(name)] for name in ("tokens", "positions", "hi", "rope_at")
    )
    at = (tokens >= IMAGE).nonzero()[0]
    if not len(at):
        return None
    ids, seen = tokens[at], hi.copy()
    time, row, column = axes = np.repeat(rope_at[None], 3, 0)
    for seq, start in zip(seqs, starts, strict=False):
        for image in seq.images:
            first, end = (min(max(x - seq.n_past, 0), seq.width) for x in (image.first, image.end))
            rows, behind = slice(start + first, start + end), slice(start + end, start + seq.width)
            i = positions[rows] - image.first
            began = rope_at[rows] - i  # where its first row stands or stood
            time[rows], row[rows], column[rows] = began, began + i // image.nx, began + i % image.nx
            seen[rows] = np.maximum(seen[rows], image.end)
            rope_at[behind] -= image.shift
    tokens[at] = 0
    return ids, at, axes, seen


def _upload_pictures(
    found: _Found,
    seqs: Sequence[Seq],
    n_row: int,
    device: torch.device,
    pictures: Mapping[int, Tensor] | None,
    shown: PictureMemory | None,
    bucket: int | None,
) -> PictureRows:
    """shown: put them there, padded to `bucket` rows."""
    ids, at, axes, seen = found
    parts = [] if pictures is None else _parts(ids, at, seqs, pictures)
    is_row = np.zeros(n_row, dtype=np.int64)
    is_row[at] = 1
    ints = sent(torch.from_numpy(np.stack([is_row, *axes, seen])), device)
    ahead = max((image.n_row - 1 for seq in seqs for image in seq.images), default=0)
    used = {image.handle for seq in seqs for image in seq.images}
    sources = {handle: own for handle, own in (pictures or {}).items() if handle in used}
    own = PictureRows(ints[0].bool()[:, None], ints[1:4], None, ints[4], ahead, sources)
    if shown is not None:
        shown.clear()
        shown.is_clear = False
        shown.is_row[:n_row].copy_(own.is_row)
        shown.axes[:, :n_row].copy_(own.axes)
        own = replace(_of_arena(shown, own.seen, bucket), ahead=ahead, sources=sources)
    if pictures is None:
        return replace(own, rows=None)
    rows = own.rows
    if rows is None:
        rows = torch.zeros(n_row, parts[0][1].shape[1], device=device)
    for first, part in parts:
        rows[first : first + len(part)].copy_(part)
    return replace(own, rows=rows)


def _of_arena(shown: PictureMemory, seen: Tensor, bucket: int | None = None) -> PictureRows:
    n = len(seen) if bucket is None else bucket
    return PictureRows(shown.is_row[:n], shown.axes[:, :n], shown.rows[:n], seen, 0, {})


def _parts(
    ids: NDArray[np.int64], at: NDArray[np.int64], seqs: Sequence[Seq], pictures: Mapping[int, Tensor]
) -> list[tuple[int, Tensor]]:
    """(first row in the batch, rows) that these ids name. OutOfBounds for one that is not there."""
    parts = []
    cuts = ((np.diff(ids) != 1) | (np.diff(at) != 1)).nonzero()[0] + 1
    for run, places in zip(np.split(ids, cuts), np.split(at, cuts), strict=True):
        handle, first = handle_of(int(run[0])), index_of(int(run[0]))
        rows = pictures.get(handle)
        if rows is None or first + len(run) > len(rows):
            slot = next(seq.slot for seq in seqs if int(run[0]) in seq.tokens)
            n = 0 if rows is None else len(rows)
            raise OutOfBounds(f"slot {slot} rows of a picture", first + len(run), n + 1, slot)
        parts.append((int(places[0]), rows[first : first + len(run)]))
    return parts


def _fresh(layout: Layout, n_out: int, device: torch.device) -> dict[str, Tensor]:
    """The fields in memory of their own, without padding: one transfer per integer type."""
    n_seq = len(layout.pages)
    page_table = np.zeros((n_seq, max(map(len, layout.pages), default=0)), dtype=np.int64)
    for i in range(n_seq):
        layout.page_row(i, page_table[i])
    wide = sent(torch.from_numpy(np.concatenate([layout.rows.ravel(), page_table.ravel()])), device)
    small = sent(
        torch.from_numpy(np.concatenate([layout.seqs.ravel(), layout.row_seq], dtype=np.int32)), device
    )
    rows, pages = wide[: layout.rows.size].view(layout.rows.shape), wide[layout.rows.size :]
    lines, row_seq = small[: layout.seqs.size].view(layout.seqs.shape), small[layout.seqs.size :]
    fields = dict(zip(ROW64, rows, strict=True)) | {
        name: line[:n_seq] for name, line in zip(SEQ32, lines, strict=True)
    }
    fields |= {"out_rows": fields["out_rows"][:n_out], "seq_start": lines[SEQ32.index("seq_start")]}
    return fields | {"page_table": pages.view(page_table.shape), "row_seq": row_seq}


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it: it may still run the round before, behind which pageable memory would be copied."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
