"""The layout of one forward: which rows belong to which slot, and where their keys and values go.

There is one builder, `lay_out`, for target and drafters, for prompt chunks and verifies, with graphs and without: what
was captured and what runs can not drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.errors import OutOfBounds
from pyspec.slots.arena import Arena, bucket_of
from pyspec.slots.table import SlotTable


@dataclass(frozen=True, slots=True)
class Seq:
    """One slot's rows in a forward.

    n_past  tokens of the slot before these rows; the first row stands at this position
    keep    every row is known to be kept (prompt chunk, undrafted token): recurrent state is stored after them.
            Otherwise the rows are recorded and the state stays before them (deferred commit)
    n_out   logits are wanted for this many trailing rows
    n_fold  recorded rows of the slot's last verify to fold into its state before these rows
    """

    slot: int
    n_past: int
    tokens: Sequence[int]
    keep: bool = False
    n_out: int = 0
    n_fold: int = 0

    @property
    def width(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of all sequences, one after another, without padding.

    seqs        the host's description, in row order
    starts      first row of each sequence, and the number of rows at the end
    tokens      [row]        int64
    positions   [row]        int64  absolute, also the rope position
    kv_rows     [row]        int64  where the row's K and V are written
    page_table  [seq, page]  int64  pages of each sequence, padded with its first page
    lo, hi      [row]        int64  the row attends to positions lo <= p < hi
    out_rows    [out]        int64  rows whose logits are wanted

    For kernels, which see no host lists:
    seq_slot    [seq]        int32  slot of each sequence
    seq_start   [seq + 1]    int32  as `starts`
    seq_fold    [seq]        int32  n_fold
    seq_keep    [seq]        int32  0 or 1
    row_seq     [row]        int32  sequence of each row
    """

    seqs: Sequence[Seq]
    starts: Sequence[int]
    tokens: Tensor
    positions: Tensor
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
    max_hi: Sequence[int]  # per sequence, on the host
    causal: bool  # rows see what stands before them and themselves
    bucket: int | None = None  # rows with padding, if the fields lie in an arena

    @property
    def n_row(self) -> int:
        return self.starts[-1]


def lay_out(
    table: SlotTable,
    seqs: Sequence[Seq],
    device: torch.device,
    *,
    see_block: bool = False,
    arena: Arena | None = None,
) -> Batch:
    """Build the batch for `seqs`; grows the slots' pages and checks every index on the host.

    `see_block`: rows see all rows of their own sequence, later ones too (a drafter's fill-in block); otherwise causal.
    `arena`: put it there, padded to a bucket, if it fits; `Batch.bucket` tells.
    """
    rows: dict[str, list[int]] = {name: [] for name in (*Arena.ROW64, "row_seq")}
    starts, tables, max_hi = [0], [], []
    for i, seq in enumerate(seqs):
        slot, n = table.slots[seq.slot], seq.width
        if not 0 <= seq.n_out <= n:
            raise OutOfBounds(f"slot {seq.slot} logits rows", seq.n_out, n + 1, seq.slot)
        end = seq.n_past + n
        table.grow(slot, end)
        rows["kv_rows"] += table.rows(slot, seq.n_past, n)
        rows["tokens"] += seq.tokens
        here = range(seq.n_past, end)
        rows["positions"] += here
        rows["hi"] += [end] * n if see_block else [p + 1 for p in here]
        rows["lo"] += [0] * n
        rows["out_rows"] += range(starts[-1] + n - seq.n_out, starts[-1] + n)
        rows["row_seq"] += [i] * n
        starts.append(starts[-1] + n)
        tables.append(slot.pages[: table.pages_for(end)])
        max_hi.append(end)
    values: dict[str, Sequence[int]] = {
        **rows,
        "seq_slot": [q.slot for q in seqs],
        "seq_start": starts,
        "seq_fold": [q.n_fold for q in seqs],
        "seq_keep": [int(q.keep) for q in seqs],
    }
    bucket = bucket_of(starts[-1]) if arena is not None and len(seqs) <= arena.n_seq else None
    if arena is not None and bucket is not None and max(map(len, tables), default=0) <= arena.n_page:
        fields = arena.fill(values, tables, bucket, table.null_row)
    else:
        bucket, fields = None, _fresh(values, tables, device)
    causal, size = not see_block, table.page_size
    return Batch(seqs=seqs, starts=starts, page_size=size, max_hi=max_hi, causal=causal, bucket=bucket, **fields)


def _fresh(
    values: dict[str, Sequence[int]], tables: Sequence[Sequence[int]], device: torch.device
) -> dict[str, Tensor]:
    """The fields in memory of their own, without padding: one transfer per integer type."""
    fields: dict[str, Tensor] = {}
    wide = max((len(t) for t in tables), default=0)
    pages = [p for t in tables for p in [*t, *[t[0]] * (wide - len(t))]]
    small = (*Arena.SEQ32, "seq_start", "row_seq")
    for dtype, parts in (
        (torch.int64, {**{name: values[name] for name in Arena.ROW64}, "page_table": pages}),
        (torch.int32, {name: values[name] for name in small}),
    ):
        flat = torch.tensor([x for part in parts.values() for x in part], dtype=dtype, device=device)
        fields |= zip(parts, flat.split([len(part) for part in parts.values()]), strict=True)
    fields["page_table"] = fields["page_table"].view(len(tables), wide)
    return fields
