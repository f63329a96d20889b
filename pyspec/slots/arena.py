"""Batches at fixed addresses, so that a captured CUDA graph can be replayed for other slots, positions and pages.

An arena is one block of device memory with a place for every field of a Batch at its largest size. A layout is written into pinned host
memory and copied in one transfer. Rows and sequences are padded up to the bucket: padded rows write their K and V to the table's null
row, belong to no sequence (row_seq -1), and their results are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# from 64 on, the sizes of `linear_tall`'s builds
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128)
WIDE = (192, 256, 384, 512, 768, 1024)  # additional sizes for verifies or drafts of all slots
PROMPTS = (256, 320, 384, 448, 512)  # of a single prompt: finer, because rows are most of its time
LEAST_PROMPT = (
    192  # fewest rows of a prompt: below, the library's attention is not used, with or without a graph
)
# places of a graph, besides the most its rows and slots allow: fewer places mean fewer launched blocks
SEQUENCES = (8, 32)
N_STAGE = 3  # host copies: the one being written is never in flight
ROW64 = ("tokens", "positions", "kv_rows", "hi", "lo", "out_rows", "rope_at")
SEQ32 = ("seq_slot", "seq_fold", "seq_keep", "seq_start")


def bucket_of(n_row: int, most: int = BUCKETS[-1]) -> int | None:
    """The smallest bucket that holds `n_row`; None if it is too many for a graph. most: rows of the largest one."""
    return next((b for b in (*BUCKETS, *WIDE) if n_row <= b <= most), None)


def most_rows(n_slot: int, width: int) -> int:
    """Rows of the largest graph for `n_slot` slots with up to `width` rows each."""
    return bucket_of(max(BUCKETS[-1], min(n_slot * width, WIDE[-1])), WIDE[-1]) or WIDE[-1]


def places_of(n_slot: int, bucket: int) -> tuple[int, ...]:
    """Possible numbers of sequences in a batch of `bucket` rows, fewest first: a graph's kernels run for all its places."""
    most = min(n_slot, bucket)
    return (*(n for n in SEQUENCES if n < most), most)


def graph_shapes(
    n_slot: int, width: int, *, least: int = 1, singles: bool = False, most: int = BUCKETS[-1]
) -> list[tuple[int, int]]:
    """(rows, sequences) of one batch for each graph that batches of `n_slot` slots use.

    least, width  fewest and most rows of a sequence
    singles       batches of one row a sequence have graphs of their own, so the others have two rows somewhere
    most          rows of the largest graph
    """
    found, sizes = [], [b for b in (*BUCKETS, *WIDE) if b <= most]
    for before, bucket in zip((0, *sizes), sizes, strict=False):
        fewer = 0
        for places in places_of(n_slot, bucket):
            n_seq = max(fewer + 1, -(-bucket // 2)) if singles and places == bucket else places
            n_seq = min(n_seq, bucket // least)
            if n_seq <= fewer:
                break
            n_row = min(bucket, n_seq * width)
            if n_row > max(before, n_seq - (not singles)):
                found.append((n_row, n_seq))
            fewer = places
    if singles:  # the last one may need padding
        found += [
            (n, n) for n in sorted({min(n_slot, BUCKETS[-1]), *(b for b in BUCKETS if b < n_slot)})
        ]
    return found


@dataclass(frozen=True, slots=True)
class Layout:
    """The integers of a batch on the host, without padding. Fields by name: see `slots.batch.Batch`.

    rows     [7, row]      int64  one line for each of ROW64; that of out_rows ends with zeros
    row_seq  [row]         int64
    seqs     [4, seq + 1]  int32  one line for each of SEQ32; the last column is seq_start's alone
    pages    per sequence  int64  as from `SlotTable.reach`
    """

    rows: NDArray[np.int64]
    row_seq: NDArray[np.int64]
    seqs: NDArray[np.int32]
    pages: Sequence[NDArray[np.int64]]

    def page_row(self, seq: int, out: NDArray[np.int64]) -> None:
        """Write the pages of a sequence, padded with its first."""
        pages = self.pages[seq]
        out[: len(pages)] = pages
        out[len(pages) :] = pages[0] if len(pages) else 0


@dataclass(frozen=True, slots=True)
class _Block:
    """Place of the fields of one type in an arena."""

    at: int  # bytes
    kind: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.at + -(-prod(self.shape) * self.kind.itemsize // 16) * 16

    def of(self, memory: Tensor) -> Tensor:
        return (
            memory[self.at : self.at + prod(self.shape) * self.kind.itemsize]
            .view(self.kind)
            .view(self.shape)
        )


class _Stage:
    """One host copy, with the event after its transfer."""

    def __init__(
        self, blocks: dict[str, _Block], n_byte: int, device: torch.device, memory: Tensor | None = None
    ) -> None:
        cuda = device.type == "cuda"
        self.memory = (
            torch.zeros(n_byte, dtype=torch.uint8, pin_memory=cuda) if memory is None else memory
        )
        self.event = torch.cuda.Event() if cuda else None
        views = {name: block.of(self.memory).numpy() for name, block in blocks.items()}
        self.rows = views["rows"]
        self.row_seq = views["row_seq"]
        self.seqs = views["seqs"]
        self.page_table = views["page_table"]
        self.pages: list[object] = [None] * len(self.page_table)  # source of each row

    def write(self, layout: Layout, null_row: int) -> None:
        n_row, n_seq = len(layout.row_seq), len(layout.pages)
        self.rows[:, :n_row] = layout.rows
        self.rows[:, n_row:] = 0
        self.rows[ROW64.index("kv_rows"), n_row:] = null_row
        self.rows[ROW64.index("hi"), n_row:] = 1
        self.row_seq[:n_row] = layout.row_seq
        self.row_seq[n_row:] = -1
        self.seqs[:, : n_seq + 1] = layout.seqs
        self.seqs[:, n_seq:] = 0
        self.seqs[SEQ32.index("seq_start"), n_seq:] = n_row
        for i, pages in enumerate(layout.pages):
            if self.pages[i] is not pages:  # most stay for many rounds
                layout.page_row(i, self.page_table[i])
                self.pages[i] = pages


class PictureMemory:
    """Static memory for rows of pictures in a single prompt. Fields: as of `slots.batch.PictureRows`.

    is_clear  no row is a picture's
    """

    def __init__(self, n_row: int, width: int, device: torch.device) -> None:
        self.is_row = torch.zeros(n_row, 1, dtype=torch.bool, device=device)
        self.axes = torch.zeros(3, n_row, dtype=torch.int64, device=device)
        self.rows = torch.zeros(n_row, width, device=device)
        self.is_clear = True

    def clear(self) -> None:
        """No row is a picture's from now on."""
        if not self.is_clear:
            self.is_row.zero_()
            self.is_clear = True


class Arena:
    """Static memory for the layouts of one caller (verify, draft, ...).

    width    most rows of a sequence, in batches of more rows than max(BUCKETS)
    n_row    rows of the largest batch of verifies or drafts
    prompts  those of PROMPTS with a captured graph; other prompts run without
    pads     batches are padded to buckets, whose graphs are captured before the first request
    shown    rows of pictures, where prompts may have some (`see`); None: a prompt with pictures is not put here
    """

    pads = True

    def __init__(self, n_seq: int, n_page: int, device: torch.device, width: int = 1) -> None:
        self.n_seq = n_seq
        self.n_page = n_page
        self.width = width
        self.n_row = most_rows(n_seq, width)
        self.prompts: set[int] = set()
        self.shown: PictureMemory | None = None
        n_row = max(self.n_row, PROMPTS[-1])
        n_start = -(-(n_seq + 1) // 4) * 4  # lines of 16 bytes
        rows = _Block(0, torch.int64, (len(ROW64), n_row))
        seqs = _Block(rows.end, torch.int32, (len(SEQ32), n_start))
        row_seq = _Block(seqs.end, torch.int32, (n_row,))
        page_table = _Block(
            row_seq.end, torch.int64, (n_seq, n_page)
        )  # last, because only its used part is copied
        blocks = {"rows": rows, "seqs": seqs, "row_seq": row_seq, "page_table": page_table}
        self.memory = torch.zeros(page_table.end, dtype=torch.uint8, device=device)
        self._pages_at = page_table.at
        self._fields = {
            (bucket, places): self._cut(blocks, bucket, places)
            for bucket in (*BUCKETS, *WIDE)
            if bucket <= self.n_row
            for places in {*places_of(n_seq, bucket), n_seq}
        }
        self._prompts = {rows: self._cut(blocks, rows, 1) for rows in PROMPTS}
        for fields in self._prompts.values():
            fields["out_rows"] = fields["out_rows"][
                :1
            ]  # logits of all these rows would be most of their memory
        self._blocks = blocks
        self._stages = self._staged(blocks, page_table.end)
        self._next = 0

    def _staged(self, blocks: dict[str, _Block], n_byte: int) -> list[_Stage]:
        return [_Stage(blocks, n_byte, self.memory.device) for _ in range(N_STAGE)]

    def bucket(self, widths: Sequence[int]) -> int | None:
        """The bucket of a batch with these widths; None if it does not fit. Large buckets are for verifies and drafts only, because products of
        many prompt rows use other kernels."""
        n_row = sum(widths)
        if len(widths) > self.n_seq or (n_row > BUCKETS[-1] and max(widths) > self.width):
            return None
        return bucket_of(n_row, self.n_row)

    def prompt_bucket(self, n_row: int) -> int | None:
        """The bucket of a single prompt; None: there is no graph for it."""
        if n_row < LEAST_PROMPT:
            return None
        return min((rows for rows in self.prompts if n_row <= rows), default=None)

    def see(self, width: int) -> None:
        """From now on prompts may have rows of pictures, of `width` numbers each. Call it before graphs are captured: those of all prompts
        choose between them and tokens."""
        self.shown = PictureMemory(PROMPTS[-1], width, self.memory.device)

    def _cut(self, blocks: dict[str, _Block], bucket: int, places: int) -> dict[str, Tensor]:
        """The fields of a batch of `bucket` rows with `places` places for sequences."""
        whole = {name: block.of(self.memory) for name, block in blocks.items()}
        out = {name: line[:bucket] for name, line in zip(ROW64, whole["rows"], strict=True)}
        out |= {name: line[:places] for name, line in zip(SEQ32, whole["seqs"], strict=True)}
        out["seq_start"] = whole["seqs"][SEQ32.index("seq_start"), : places + 1]
        return out | {"page_table": whole["page_table"][:places], "row_seq": whole["row_seq"][:bucket]}

    def fill(
        self, layout: Layout, bucket: int, null_row: int, *, n_out: int = 0, prompt: bool = False
    ) -> dict[str, Tensor]:
        """Write a layout, padded to `bucket` rows, and start its copy. Returns the fields cut to the bucket and to the fewest places.

        n_out: rows with logits; a graph has those of all its rows.
        """
        n_seq = len(layout.pages)
        places = next((n for n in places_of(self.n_seq, bucket) if n >= n_seq), self.n_seq)
        used = self._pages_at + 8 * n_seq * self.n_page
        stage = self._stages[self._next]
        self._next = (self._next + 1) % N_STAGE
        if stage.event is not None:
            stage.event.synchronize()
        stage.write(layout, null_row)
        self.memory[:used].copy_(stage.memory[:used], non_blocking=True)
        if stage.event is not None:
            stage.event.record()
        return self._prompts[bucket] if prompt else self._fields[bucket, places]


MOST_CUTS = 512  # views of a batch's fields that are kept, by its shape
TAPED = 64  # most rows of a recorded forward; of more, the time between calls is a small part


class HostArena(Arena):
    """An arena that the CPU reads itself, for recorded forwards (pyspec.cpu.tape).

    A batch keeps its own rows, sequences and outputs: recording takes no longer than running, and a row of padding would cost as much as
    another. No batch is in flight while the next one is written.
    """

    pads = False

    def __init__(self, n_seq: int, n_page: int) -> None:
        super().__init__(n_seq, n_page, torch.device("cpu"))
        self.n_row = TAPED
        self._cuts: dict[tuple[int, int, int], dict[str, Tensor]] = {}

    def _staged(self, blocks: dict[str, _Block], n_byte: int) -> list[_Stage]:
        return [_Stage(blocks, n_byte, self.memory.device, self.memory)]

    def bucket(self, widths: Sequence[int]) -> int | None:
        """The batch's own number of rows; None if they are too many to be recorded."""
        n_row = sum(widths)
        return n_row if n_row <= TAPED and len(widths) <= self.n_seq else None

    def prompt_bucket(self, n_row: int) -> int | None:
        """None: prompts are batches like others."""
        return None

    def fill(
        self, layout: Layout, bucket: int, null_row: int, *, n_out: int = 0, prompt: bool = False
    ) -> dict[str, Tensor]:
        """Write a layout. Returns the fields cut to its rows, sequences and outputs."""
        key = bucket, len(layout.pages), n_out
        if key not in self._cuts:
            if len(self._cuts) >= MOST_CUTS:
                self._cuts.clear()
            fields = self._cut(self._blocks, bucket, len(layout.pages))
            self._cuts[key] = fields | {"out_rows": fields["out_rows"][:n_out]}
        self._stages[0].write(layout, null_row)
        return self._cuts[key]
