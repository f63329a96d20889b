"""Batches at fixed addresses: what a CUDA graph captured can be replayed for other slots, positions and pages.

An arena is one block of device memory with a place for every field of a Batch, at its largest. A layout is written into
pinned host memory and copied over in one transfer; rows and sequences up to the bucket are padded: padded rows write their
K and V to the table's null row, belong to no sequence (row_seq -1) and give results nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
RING = 3  # host copies: the one being written is never the one in flight


def bucket_of(n_row: int) -> int | None:
    """The smallest bucket that holds `n_row`; None if it is too many for a graph."""
    return next((b for b in BUCKETS if b >= n_row), None)


@dataclass
class _Stage:
    """One host copy and the event that says it has been read."""

    memory: Tensor  # uint8, pinned where there is a GPU
    event: torch.cuda.Event | None = None
    views: dict[str, np.ndarray] = field(default_factory=dict)


class Arena:
    """Static memory for the layouts of one caller (verify, draft, ...) of at most max(BUCKETS) rows.

    Fields by name, at their largest: see `slots.batch.Batch`.
    """

    ROW64 = ("tokens", "positions", "kv_rows", "hi", "lo", "out_rows")
    SEQ32 = ("seq_slot", "seq_fold", "seq_keep")

    def __init__(self, n_seq: int, n_page: int, device: torch.device) -> None:
        self.n_seq, self.n_page, self.device = n_seq, n_page, device
        wide = BUCKETS[-1]
        sizes = [(name, np.int64, wide) for name in self.ROW64] + [("page_table", np.int64, n_seq * n_page)]
        sizes += [(name, np.int32, n_seq) for name in self.SEQ32]
        sizes += [("seq_start", np.int32, n_seq + 1), ("row_seq", np.int32, wide)]
        self._places: list[tuple[str, type, int, int]] = []
        at = 0
        for name, dtype, n in sizes:
            self._places.append((name, dtype, at, n))
            at += -(-n * np.dtype(dtype).itemsize // 16) * 16
        self.memory = torch.zeros(at, dtype=torch.uint8, device=device)
        self.fields = {name: self._view(self.memory, dtype, at, n) for name, dtype, at, n in self._places}
        self._stages = [self._stage(at) for _ in range(RING)]
        self._next = 0

    @staticmethod
    def _view(memory: Tensor, dtype: type, at: int, n: int) -> Tensor:
        kind = torch.int64 if dtype is np.int64 else torch.int32
        return memory[at : at + n * kind.itemsize].view(kind)

    def _stage(self, n_bytes: int) -> _Stage:
        memory = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        views = {name: self._view(memory, dtype, at, n).numpy() for name, dtype, at, n in self._places}
        return _Stage(memory, None, views)

    def fill(
        self, values: dict[str, Sequence[int]], pages: Sequence[Sequence[int]], bucket: int, null_row: int
    ) -> dict[str, Tensor]:
        """Write a layout, padded to `bucket` rows, and start its copy. Returns the fields cut to the bucket."""
        stage = self._stages[self._next]
        self._next = (self._next + 1) % RING
        if stage.event is not None:
            stage.event.synchronize()
        pad = {"kv_rows": null_row, "hi": 1, "row_seq": -1, "seq_start": values["seq_start"][-1]}
        for name, view in stage.views.items():
            if name != "page_table":
                given = values[name]
                view[: len(given)] = given
                view[len(given) :] = pad.get(name, 0)
        table = stage.views["page_table"].reshape(self.n_seq, self.n_page)
        for row, mine in zip(table, pages, strict=False):
            row[: len(mine)] = mine
            row[len(mine) :] = mine[0] if mine else 0
        self.memory.copy_(stage.memory, non_blocking=True)
        if self.device.type == "cuda":
            stage.event = torch.cuda.Event()
            stage.event.record()
        out = {name: self.fields[name][:bucket] for name in (*self.ROW64, "row_seq")}
        out |= {name: self.fields[name] for name in (*self.SEQ32, "seq_start")}
        out["page_table"] = self.fields["page_table"].view(self.n_seq, self.n_page)
        return out
