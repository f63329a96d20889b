"""A recurrence on CPUs: a compiled kernel for one head of one slot at a time, so that its state stays in the core's cache."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda.ops.recurrent.ref import record
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer

Head = Callable[..., None]
"""head(state, *four rows as in a record [n, ...], query [n, dim], out [n, dim]), in place; query and out are empty to fold only."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Heads share one record, and the query: `of(head)` is their index there."""

    record: int
    of: Callable[[int], int]


def missing(device: torch.device) -> str | None:
    """Why no such kernel runs; None if one may."""
    if device.type != "cpu":
        return "runs on CPUs only"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install numba)"
    return None


def run_heads(
    head: Head,
    layer: StateLayer,
    batch: Batch,
    rows: Sequence[Tensor],
    query: Tensor,
    shared: Shared,
) -> Tensor:
    """Fold, then run a batch's rows, in the order of the records [row, head, ...], with `query` -> out [row, head, dim]."""
    # [head, row, ...] so that a head's rows are contiguous: numba vectorises contiguous rows only
    *new, asked = (t.transpose(0, 1).contiguous().numpy() for t in (*rows, query))
    n_head, dim, width = layer.state.shape[1:]
    result, states = np.empty((n_head, query.shape[0], dim), np.float32), layer.state.numpy()
    old = [t.numpy() for t in layer.records()]
    nothing = np.zeros((0, width), np.float32), np.zeros((0, dim), np.float32)

    def one(s: int, h: int) -> None:
        seq, at = batch.seqs[s], slice(batch.starts[s], batch.starts[s + 1])
        slot, fold, group = seq.slot, seq.n_fold, shared.of(h)
        of = [group if i == shared.record else h for i in range(len(new))]
        state = states[slot, h].copy() if seq.late else states[slot, h]
        if fold:
            kept = (np.ascontiguousarray(r[slot, :fold, i]) for r, i in zip(old, of, strict=True))
            head(state, *kept, *nothing)
        live = state if seq.keep or seq.late else state.copy()
        head(live, *(r[i, at] for r, i in zip(new, of, strict=True)), asked[group, at], result[h, at])

    run_all(one, [(s, h) for s in range(len(batch.seqs)) for h in range(n_head)])
    record(layer, batch, rows)
    return torch.from_numpy(result).transpose(0, 1)


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(torch.get_num_threads() - 1, 1), "pyspec-state")


def run_all(one: Callable[..., None], work: Sequence[tuple[int, ...]]) -> None:
    """one(*w) for each w, half of them on a second thread if torch has more than one; `one` must release the GIL to gain from it."""

    def run(part: Sequence[tuple[int, ...]]) -> None:
        for w in part:
            one(*w)

    half = len(work) // 2 if torch.get_num_threads() > 1 else 0
    other = _pool().submit(run, work[:half]) if half else None
    run(work[half:])
    if other is not None:
        other.result()
