"""Long prompts of heads with a window or sinks: our own kernel takes them in pieces that its planned workspace has room for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyspec.cuda.ops.attend import prompt as attend_prompt
from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend.cases import TOLERANCE, Case, make, worst
from pyspec.cuda.ops.attend.cuda import FEW, MANY, SPLIT
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool

CPU, HEADS = torch.device("cpu"), (6, 2, 64)


class Planned:
    """Our own attention, which has room for what is planned: rows times splits of one sequence."""

    def __init__(self, spec: AttendSpec) -> None:
        self.run, self.pieces = attend_ref.bind(spec), list[tuple[int, int]]()

    def __call__(
        self, q: Tensor, pool: KVPool, batch: Batch, window: int = 0, sinks: Tensor | None = None
    ) -> Tensor:
        for seq, n_key in zip(batch.seqs, batch.max_hi, strict=True):
            n_split = -(-n_key // SPLIT)
            assert seq.width * n_split <= max(FEW * n_split, MANY), f"{seq.width} rows of {n_key} keys"
            self.pieces.append((seq.width, n_key))
        return self.run(q, pool, batch, window, sinks)


# Without either the library attends
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("window", "sinks"),
    [
        (window, sinks)
        for window in (0, 1, 8, 100, 1000, -8, -100, -1024)
        for sinks in (False, True)
        if window or sinks
    ],
)
@pytest.mark.parametrize(
    "seqs",
    [[(0, 193)], [(0, 511), (70, 1)], [(333, 257), (5, 3), (0, 401)], [(4 * SPLIT - 3, 197)]],
    ids=str,
)
def test_odd_numbers_of_rows_stay_in_the_planned_workspace(
    seqs: list[tuple[int, int]], window: int, sinks: bool
) -> None:
    case = Case(*HEADS, torch.float16, seqs, window=window, scale=0.125, sinks=sinks)
    made, spec = make(case, CPU), AttendSpec(CPU, *HEADS, 0.125, has_sinks=sinks)
    own = Planned(spec)

    def library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise AssertionError("the library has neither windows nor sinks")

    got = attend_prompt.beside(own, library)(made.q, made.pool, made.plain, window, made.sinks)
    want = attend_ref.bind(spec)(made.q, made.pool, made.plain, window, made.sinks)
    assert worst(got, want) < TOLERANCE[torch.float16]
    assert sum(n for n, _ in own.pieces) == sum(n for _, n in seqs)


def test_pieces_read_the_pages_of_their_window_only() -> None:
    """So they need not get smaller as the context grows."""
    made = make(Case(*HEADS, torch.float16, [(6 * SPLIT, 400)], window=128, scale=0.125), CPU)
    own = Planned(AttendSpec(CPU, *HEADS, 0.125))
    attend_prompt.in_pieces(own)(made.q, made.pool, made.plain, 128)
    assert [n for n, _ in own.pieces] == [MANY, MANY, 16]
    assert max(n_key for _, n_key in own.pieces) < 128 + made.plain.page_size + MANY


def test_pieces_read_the_pages_of_their_chunks_only() -> None:
    made = make(Case(*HEADS, torch.float16, [(6 * SPLIT, 400)], window=-128, scale=0.125), CPU)
    own = Planned(AttendSpec(CPU, *HEADS, 0.125))
    attend_prompt.in_pieces(own)(made.q, made.pool, made.plain, -128)
    assert own.pieces == [(MANY, MANY), (MANY, MANY + 64), (16, 16)]
