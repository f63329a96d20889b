"""index_rows.cu against the reference to the row and itself, thread by thread on the CPU and on a card; and compiles everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from machines import CPU, GPU, NO_FAULT, ON_CARD, Machine, cases, compiled
from sampling import few
from torch import Tensor

from pyspec.cuda.jit import ARCHS
from pyspec.cuda.ops.index_rows import cuda as index_cuda
from pyspec.cuda.ops.index_rows import ref as index_ref
from pyspec.cuda.ops.index_rows.cases import Asked, check, fault_of, make
from pyspec.cuda.ops.index_rows.ref import IndexSpec
from pyspec.cuda.ops.ragged import Ragged, only
from pyspec.slots.batch import Batch

SPEC = IndexSpec(CPU, 8, 32, 8, 4, torch.float16, 16)
GROUPS = IndexSpec(CPU, 12, 64, 8, 4, torch.float16, 32)  # that warpgroups take
TYPES = [torch.float16, torch.bfloat16]


MODELS = IndexSpec(GPU, 64, 128, 512, 4, torch.float16, 64)
WIDE = Ragged([(5000 + 431 * i, 1 + i) for i in range(17)], 32, (7, 2))


def run(launch: Any, asked: Asked, batch: Batch | None = None) -> Tensor:
    chosen: Tensor = launch(asked.q, asked.w, asked.freq, asked.pool, batch or asked.placed.batch)
    return chosen


def wanted(asked: Asked, spec: IndexSpec, plain: Batch | None = None) -> Tensor:
    return run(index_ref.bind(spec), asked, plain or asked.placed.plain)


def chosen(machine: Machine, case: Ragged, spec: IndexSpec, seed: int, *, whole: bool = True) -> None:
    """The kernel's choice is the reference's; `whole`: to the row, else as good as rounded queries allow."""
    asked = make(case, spec, seed, whole=whole)
    with machine.started(seed=seed):
        got = run(index_cuda.bind(spec), asked)
        assert machine.faults().tolist() == NO_FAULT
    assert torch.equal(got, wanted(asked, spec)) if whole else fault_of(got, asked, spec) is None


@cases(
    "spec, seed",
    emulated=[
        (replace(SPEC, kv=torch.bfloat16), 0),
        (IndexSpec(CPU, 12, 64, 5, 4, torch.float16, 64), 1),
        (IndexSpec(CPU, 64, 128, 32, 4, torch.float16, 64), 2),
    ],
    card=[
        (IndexSpec(GPU, n_head, dim, top_k, 4, kv, dim // 2), 0)
        for n_head, dim, top_k in ((64, 128, 512), (64, 128, 8), (32, 32, 6), (12, 64, 1024))
        for kv in TYPES
    ],
    slow=True,
)
def test_its_own_check_holds(machine: Machine, spec: IndexSpec, seed: int) -> None:
    with machine.started(seed=seed):
        assert check(index_cuda.bind(spec), index_ref.bind(spec), spec) is None
        assert machine.faults().tolist() == NO_FAULT


def test_queries_without_weights_choose_as_with_ones(machine: Machine) -> None:
    asked = make(Ragged([(103, 3), (63, 5)], 16, (2, 1)), SPEC, 5, whole=True)
    alike = replace(asked, w=torch.ones_like(asked.w))
    with machine.started():
        got = run(index_cuda.bind(SPEC), replace(asked, w=None))  # type: ignore[arg-type]
        assert torch.equal(got, run(index_cuda.bind(SPEC), alike))
    n = asked.placed.plain.n_row
    none, ones = (wanted(replace(x, w=w), SPEC) for x, w in ((asked, None), (alike, alike.w[:n])))  # type: ignore[arg-type]
    assert torch.equal(none[:n], ones[:n]) and torch.equal(got[:n], ones[:n])


@pytest.mark.parametrize("whole", few([True, False], True))
def test_widths_from_1_to_17_side_by_side_choose_the_references_rows(
    machine: Machine, whole: bool
) -> None:
    chosen(machine, Ragged([(31 * i % 97, 1 + i) for i in range(17)], 16, (3, 2)), SPEC, 1, whole=whole)


@pytest.mark.parametrize(
    ("seqs", "n_multiprocessor"),
    [([(1000, 5), (1290, 9), (40, 3)], 3), ([(900, 17)], 5), ([(700, 1)], 20)],
)
def test_warpgroups_score_tiles_of_every_size(
    machine: Machine, seqs: list[tuple[int, int]], n_multiprocessor: int
) -> None:
    asked = make(Ragged(seqs, 32, (1, 1)), GROUPS, 7, whole=True)
    with machine.started(seed=7, n_multiprocessor=n_multiprocessor):
        launch = index_cuda.bind(GROUPS)
        got = run(launch, asked)
        assert launch.scorer.pad == 16 and machine.faults().tolist() == NO_FAULT
    assert torch.equal(got, wanted(asked, GROUPS))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [(8, 0), (12, 0)])
@pytest.mark.parametrize("top_k", [1, 6, 512])
def test_rows_around_what_may_be_chosen_are_the_references(
    machine: Machine, top_k: int, arch: tuple[int, int]
) -> None:
    spec, full = replace(SPEC, top_k=top_k), 4 * top_k
    case = Ragged([(max(full + d, 0), w) for d in (-5, -1, 0, 3, 4, 600) for w in (1, 2, 6)], 64, (1, 1))
    asked = make(case, spec, 3, whole=True)
    with machine.started(arch, seed=3):
        got = run(index_cuda.bind(spec), asked)
    assert torch.equal(got, wanted(asked, spec))


@pytest.mark.slow
def test_more_rows_than_scores_fit_and_more_sequences_than_a_launch_takes(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_cuda, "MOST_SCORES", 70 * 30)
    chosen(machine, Ragged([(37 * i % 211, 1 + i % 3) for i in range(140)], 16, (5, 3)), SPEC, 4)
    chosen(machine, Ragged([(20, 250), (300, 1)], 32), SPEC, 5)


def test_rows_are_moved_on_the_device_without_the_host_knowing(machine: Machine) -> None:
    case = Ragged([(100, 3), (60, 5)], 16)
    asked = make(Ragged([(103, 3), (63, 5)], 16), SPEC, whole=True)
    early = make(case, SPEC).placed.batch
    moved = replace(asked.placed.batch, seqs=early.seqs, bucket=8)
    with machine.started(seed=2):
        got = run(index_cuda.bind(SPEC), asked, moved)
    assert torch.equal(got, wanted(asked, SPEC))


@pytest.mark.slow
@pytest.mark.parametrize("n", [513, 1500, 16384, 16385, 40000])
def test_scores_that_registers_hold_and_more_are_chosen_from_alike(machine: Machine, n: int) -> None:
    gen = torch.Generator().manual_seed(n)
    scores = torch.stack((torch.randn(n, generator=gen), torch.randint(-3, 3, (n,), generator=gen).float() * 0.0 - 1, torch.randint(-9, 9, (n,), generator=gen).float(), torch.randn(n, generator=gen).mul(300).round() / 300))  # fmt: skip
    scores[1, ::3] = -0.0
    scores[1, 1::3] = 0.0
    scores[2, ::2] = -torch.inf
    top_k, out, i32 = 512, torch.empty(4, 512, dtype=torch.int32), np.int32
    spec, n_col = replace(SPEC, top_k=top_k), -(-4 * n // 64)
    with machine.started(seed=1):
        kernel = index_cuda.bind(spec).choose
        layout = [
            torch.zeros(1, n_col, dtype=torch.int64),
            torch.full((4,), 4 * n - 1),
            torch.zeros(4, dtype=torch.int32),
        ]
        kernel.launch(
            (4,),
            1024,
            [scores, *layout, out, machine.faults(), *map(i32, (n_col, 64, 4, 16, 1, top_k, 0, n))],
            4 * min(n, index_cuda.HELD),
        )
    want = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].sort(-1).values
    assert torch.equal(out.long(), want)


def test_a_score_that_is_no_number_is_reported_and_comes_last(machine: Machine) -> None:
    asked = make(Ragged([(90, 1), (100, 2), (70, 1)]), SPEC, whole=True)
    right = wanted(asked, SPEC)
    asked.q[1, 2, 3] = torch.nan
    with machine.started(seed=3):
        got = run(index_cuda.bind(SPEC), asked)
        assert machine.faults().tolist()[:4] == [1, index_cuda.GUARD.number, 1, -1]
    assert torch.equal(got[[0, 2, 3]], right[[0, 2, 3]]) and bool((got[1] >= 0).all())


@pytest.mark.parametrize("bad", [-1, 1000, 1 << 40])
def test_a_page_or_position_out_of_bounds_is_reported_and_other_sequences_are_right(
    machine: Machine, bad: int
) -> None:
    asked = make(Ragged([(90, 3), (100, 2), (70, 1)]), SPEC, whole=True)
    asked.pool.k.nan_to_num_(0.0)  # the page that is read instead may have no owner
    right, batch = wanted(asked, SPEC), asked.placed.batch
    table, positions = batch.page_table.clone(), batch.positions.clone()
    table[1, 1], positions[4] = bad, bad
    for wrong in (replace(batch, page_table=table), replace(batch, positions=positions)):
        with machine.started(seed=5):
            got = run(index_cuda.bind(SPEC), asked, wrong)
            assert machine.faults().tolist()[:3] == [1, index_cuda.GUARD.number, 1]
        assert torch.equal(got[[0, 1, 2, 5]], right[[0, 1, 2, 5]])


def test_no_rows_are_no_launch(machine: Machine) -> None:
    asked = make(Ragged([(90, 3)]), SPEC)
    with machine.started():
        assert index_cuda.bind(SPEC)(asked.q[:0], asked.w[:0], asked.freq, asked.pool, replace(asked.placed.batch, positions=asked.placed.batch.positions[:0], row_seq=asked.placed.batch.row_seq[:0])).shape == (0, 8)  # fmt: skip


@ON_CARD
def test_widths_from_1_to_17_are_the_references_alone_and_the_same_twice(machine: Machine) -> None:
    asked, launch = make(WIDE, MODELS, whole=True), index_cuda.bind(MODELS)
    got = run(launch, asked)
    assert torch.equal(got, wanted(asked, MODELS)) and torch.equal(got, run(launch, asked))
    asked = make(WIDE, MODELS)
    got = run(launch, asked)
    assert fault_of(got, asked, MODELS) is None
    for seq, (_, width) in enumerate(WIDE.seqs):
        rows, one = only(asked.placed.plain, seq, width // 2, 1)
        assert torch.equal(launch(asked.q[rows], asked.w[rows], asked.freq, asked.pool, one), got[rows])


@cases(
    "case",
    card=[
        *(Ragged([(n, 3), (n // 2, 2), (100, 1)], 64, (2, 1)) for n in (65_530, 70_000, 400_000)),
        Ragged([(0, 2500), (4000, 400), (9000, 1)], 32),
    ],
)
def test_long_contexts_and_prompts_are_the_references(machine: Machine, case: Ragged) -> None:
    asked = make(case, MODELS, whole=True)
    assert torch.equal(run(index_cuda.bind(MODELS), asked), wanted(asked, MODELS))


@cases(
    "spec, seqs, shifts",
    emulated=[(SPEC, [(900, 4), (500, 4)], (0, -1, -280, -490))],
    card=[(MODELS, [(9000, 4), (5000, 4)], (0, -1, -2, -2800, -4990))],
)
def test_a_captured_index_serves_batches_of_other_lengths(
    machine: Machine, spec: IndexSpec, seqs: list[tuple[int, int]], shifts: tuple[int, ...]
) -> None:
    asked = make(Ragged(seqs), spec, whole=True)
    own = asked.placed.batch
    batch = replace(own, positions=own.positions.clone(), bucket=8, seqs=())
    with machine.started():
        launch = index_cuda.bind(spec)
        replay, out = machine.captured(lambda: run(launch, asked, batch))
        for shift in shifts:
            batch.positions.copy_(own.positions + shift)
            replay()
            plain = replace(asked.placed.plain, positions=batch.positions)
            assert torch.equal(out, wanted(asked, spec, plain)), shift
        assert machine.faults().tolist() == NO_FAULT


@ON_CARD
def test_a_page_that_does_not_exist_is_reported_and_no_number_too(machine: Machine) -> None:
    asked, launch = make(WIDE, MODELS, whole=True), index_cuda.bind(MODELS)
    asked.pool.k.nan_to_num_(0.0)
    right, table = run(launch, asked), asked.placed.batch.page_table.clone()
    table[3, 5] = 1 << 33
    bad = run(launch, asked, replace(asked.placed.batch, page_table=table))
    assert machine.faults().tolist()[:3] == [1, index_cuda.GUARD.number, 3]
    machine.faults().zero_()
    starts = asked.placed.plain.starts
    for rows in (slice(0, starts[3]), slice(starts[4], None)):
        assert torch.equal(bad[rows], right[rows])
    asked.q[starts[2]] = torch.nan
    run(launch, asked)
    assert machine.faults().tolist()[:4] == [1, index_cuda.GUARD.number, 2, -1]
    machine.faults().zero_()


@pytest.mark.slow
@pytest.mark.parametrize("kv", TYPES)
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_for_every_architecture_without_spills(arch: str, kv: torch.dtype) -> None:
    for spec in (IndexSpec(CPU, 64, 128, 512, 4, kv, 64), replace(SPEC, kv=kv)):
        scorer = index_cuda.scorer_of(spec, (9, 0) if arch == "sm_90a" else (8, 0))
        found = compiled("index_rows", arch, index_cuda.defines(spec, scorer))
        assert set(found) == set(index_cuda.FORMS)
        assert found["index_rows_scores"].registers * scorer.threads * scorer.resident <= 65536
        assert found["index_rows_choose"].registers * index_cuda.CHOOSERS <= 65536
