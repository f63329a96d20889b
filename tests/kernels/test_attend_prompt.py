"""Prompts take the library's attention, sequence by sequence; what stands beside them takes ours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pyspec.cuda.ops.attend import prompt as attend_prompt
from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend.cases import TOLERANCE, Case, make, worst
from pyspec.cuda.ops.attend.cuda import FEW, MANY
from pyspec.cuda.ops.attend.prompt import attend_prompt as op
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.slots.batch import Batch, Seq
from pyspec.slots.kv import KVPool

CPU = torch.device("cpu")
HEADS = (6, 2, 64)
SPEC = AttendSpec(CPU, *HEADS, 0.125)
BATCHES = {
    "first chunk": [(0, MANY)],
    "later chunk": [(300, MANY + 7)],
    "beside decoding": [(70, 1), (40, MANY), (9, 4)],
    "two prompts": [(0, MANY), (5, 3), (200, 250)],
    "short": [(0, MANY - 1), (3, 2)],
}


class Counted:
    """Our own attention, and the widths it was asked for."""

    def __init__(self) -> None:
        self.run, self.widths = attend_ref.bind(SPEC), list[int]()

    def __call__(self, q: Tensor, pool: KVPool, batch: Batch, window: int = 0, sinks: Tensor | None = None) -> Tensor:
        self.widths += [seq.width for seq in batch.seqs]
        assert len(q) == batch.n_row == len(batch.row_seq) and batch.seq_start.tolist() == list(batch.starts)
        return self.run(q, pool, batch, window, sinks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("seqs", BATCHES.values(), ids=BATCHES.keys())
def test_rows_equal_the_reference_whoever_runs_them(seqs: list[tuple[int, int]], dtype: torch.dtype) -> None:
    made, own = make(Case(*HEADS, dtype, seqs, scale=0.125), CPU), Counted()
    got = attend_prompt.beside(own, attend_prompt.by_torch(SPEC))(made.q, made.pool, made.plain, 0)
    assert worst(got, attend_ref.bind(SPEC)(made.q, made.pool, made.plain)) < TOLERANCE[dtype]
    assert own.widths == [w for _, w in seqs if w < MANY]


@pytest.mark.parametrize(
    ("n_past", "width", "keep", "is_long"),
    [
        (5000, 100, True, True),  # 5 splits and 100 rows
        (5000, 100, False, False),  # a verify: as wide as graphs have them, and to the bit like theirs
        (900, 100, True, False),
        (200_000, 1, True, False),  # an undrafted token
        (200_000, FEW, True, False),
        (200_000, FEW + 1, True, True),
        (0, MANY, False, True),
    ],
)
def test_pieces_of_prompts_behind_many_keys_are_the_librarys(
    n_past: int, width: int, keep: bool, is_long: bool
) -> None:
    seq = Seq(0, n_past, [0] * width, keep=keep)
    assert attend_prompt.is_long(seq, n_past + width) == is_long


def test_a_sequence_has_the_same_bits_alone() -> None:
    made = make(Case(*HEADS, torch.float16, BATCHES["two prompts"], scale=0.125), CPU)
    alone = make(Case(*HEADS, torch.float16, BATCHES["first chunk"], scale=0.125), CPU)
    attend = attend_prompt.beside(attend_ref.bind(SPEC), attend_prompt.by_torch(SPEC))
    keys = attend_ref.key_rows(alone.plain, 0), attend_ref.key_rows(made.plain, 0)
    for to, source in ((alone.pool.k, made.pool.k), (alone.pool.v, made.pool.v)):
        to[keys[0]] = source[keys[1]]
    assert torch.equal(
        attend(made.q, made.pool, made.plain, 0)[:MANY], attend(made.q[:MANY], alone.pool, alone.plain, 0)
    )


@pytest.mark.parametrize("change", [{"block": True}, {"window": 50}, {"dtype": torch.float32}, {"sinks": True}])
def test_blocks_windows_f32_and_sinks_stay_with_our_own(change: dict[str, object]) -> None:
    case, own = replace(Case(*HEADS, torch.float16, [(20, MANY)]), **change), Counted()  # type: ignore[arg-type]
    made = make(case, CPU)
    attend_prompt.beside(own, attend_prompt.by_torch(SPEC))(made.q, made.pool, made.plain, case.window, made.sinks)
    assert own.widths == [MANY]


def test_the_check_finds_a_shifted_mask() -> None:
    def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # upper left where keys and rows differ in number
        return attend_prompt.reference(SPEC)(q, k[: len(q)], v[: len(q)])

    assert attend_prompt.check(attend_prompt.by_torch(SPEC), attend_prompt.reference(SPEC), SPEC) is None
    assert "differs" in str(attend_prompt.check(shifted, attend_prompt.reference(SPEC), SPEC))
    assert op.refusal(op.impls[0], SPEC) == "for GPUs"
