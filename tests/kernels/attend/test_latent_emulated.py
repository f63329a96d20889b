"""attend_latent.cu and its launcher run thread by thread on the CPU: keys that are their values, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.ops.attend import latent
from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend.cases import Case, Made, make, only, spec_of, worst
from pyspec.cuda.ops.attend.latent import LatentBuild
from pyspec.slots.kv_types import Q4_0, Q5_1

pytestmark = [needs_compiler, pytest.mark.sampled(1)]
F8 = torch.float8_e4m3fn
CASES = {
    "first token": Case(3, 1, 64, torch.float16, [(0, 1), (0, 5)], n_value=48),
    "ragged": Case(
        5, 1, 128, torch.float16, [(0, 3), (255, 1), (127, 9), (1023, 2)], 32, pad=(5, 2), n_value=96
    ),
    "ragged bf16": Case(17, 1, 64, torch.bfloat16, [(17, 3), (700, 1)], 64, pad=(1, 1), n_value=64),
    "more heads than columns": Case(72, 1, 64, torch.float16, [(70, 2), (3, 1)], n_value=32),
    "small window": Case(6, 1, 64, torch.bfloat16, [(600, 5), (127, 2), (9, 4)], 16, 7, n_value=48),
    "window of one": Case(6, 1, 64, torch.float16, [(600, 5), (128, 1)], 16, 1, n_value=48),
    "odd size": Case(5, 1, 24, torch.float16, [(40, 3), (0, 2)], 16, pad=(1, 1), n_value=16),
    "odd size f8": Case(5, 1, 104, F8, [(40, 3), (0, 2)], 16, n_value=80),
    "drafter block": Case(
        4, 1, 64, torch.float16, [(1100, 8), (100, 8)], 16, 0, True, (8, 1), n_value=48
    ),
    "many sequences": Case(
        7,
        1,
        64,
        torch.float16,
        [(i * 37 % 61, 1 + i % 3) for i in range(71)],
        16,
        pad=(3, 4),
        n_value=48,
    ),
    "q8_0": Case(6, 1, 128, torch.int8, [(0, 3), (127, 9), (260, 1)], 32, pad=(5, 2), n_value=96),
    "f8": Case(6, 1, 64, F8, [(17, 3), (300, 1)], 64, n_value=48),
    "q4_0": Case(6, 1, 64, Q4_0, [(17, 3), (300, 1)], 16, pad=(1, 1), n_value=32),
    "q5_1": Case(6, 1, 64, Q5_1, [(70, 2), (30, 1)], 16, n_value=64),
}


def run(case: Case, made: Made, q: Tensor, batch: object, build: LatentBuild | None = None) -> Tensor:
    return latent.bind(spec_of(case, CPU), build=build)(q, made.pool, batch, case.window)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_every_row_is_the_references_and_padding_comes_out_as_zeros(name: str, seed: int) -> None:
    case = CASES[name]
    made, n = make(case, CPU, seed), sum(width for _, width in case.seqs)
    want = attend_ref.bind(spec_of(case, CPU))(made.q[:n].double(), made.pool, made.plain, case.window)
    assert want.shape[-1] == case.n_value
    with emulated_gpu(seed=seed):
        out = run(case, made, made.q, made.batch)
        assert faults.record(CPU).tolist() == [0] * 5
    assert worst(out[:n], want) < case.tolerance
    assert not out[n:].any()


@pytest.mark.parametrize(
    "name", ["ragged", "more heads than columns", "small window", "q8_0", "odd size"]
)
def test_a_row_has_the_same_bits_alone_and_in_any_company_and_build(name: str) -> None:
    case = CASES[name]
    made = make(case, CPU)
    with emulated_gpu():
        want = run(case, made, made.q, made.batch)
        for build in latent.builds(spec_of(case, CPU), "sm_90a"):
            for one in {build, replace(build, buffers=1)}:
                assert torch.equal(run(case, made, made.q, made.batch, one), want), one
        for seq, (_, width) in enumerate(case.seqs):
            start = made.plain.starts[seq]
            for first, n in ((0, width), (width - 1, 1)):
                q, batch = only(made, seq, first, n)
                got = run(case, made, q, batch)
                assert torch.equal(got, want[start + first : start + first + n])


@pytest.mark.parametrize("columns", [16, 64])
def test_rows_on_both_sides_of_a_length_with_larger_parts_share_a_tile(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of 128 keys up to 256, and of twice as many behind: a verify of 17 rows over that length, and one far behind."""
    monkeypatch.setattr(latent, "parts_of", lambda spec: 2)
    case = Case(3, 1, 64, torch.float16, [(250, 17), (0, 1), (1020, 9)], 16, pad=(2, 1), n_value=48)
    made, spec = make(case, CPU), spec_of(case, CPU)
    n = made.plain.n_row
    want = attend_ref.bind(spec)(made.q[:n].double(), made.pool, made.plain)
    with emulated_gpu():
        build = LatentBuild(64, 48, columns, 2, spec.kv.k)
        out = run(case, made, made.q, made.batch, build)
        assert worst(out[:n], want) < case.tolerance and not out[n:].any()
        for row in (0, 5, 6, 16):
            q, batch = only(made, 0, row, 1)
            assert torch.equal(run(case, made, q, batch, build)[0], out[row])
        assert faults.record(CPU).tolist() == [0] * 5


def test_more_tiles_than_there_is_room_for_run_some_at_a_time_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = CASES["ragged"]
    made, n_launch = make(case, CPU), 0
    with emulated_gpu():
        want = run(case, made, made.q, made.batch)
        monkeypatch.setattr(latent, "at_once", lambda size, room: 2)
        launch = latent.bind(spec_of(case, CPU), build=LatentBuild(128, 96, 16, 2, case.kv.k))
        parts = launch.kernels[launch.builds[0]][0]
        plain = type(parts).launch

        def counted(self: object, *args: object, **more: object) -> None:
            nonlocal n_launch
            n_launch += self is parts
            plain(self, *args, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(type(parts), "launch", counted)
        assert torch.equal(launch(made.q, made.pool, made.batch), want)
    assert n_launch == 3  # of tiles: 1, 1, 3 and 1


def test_many_rows_are_one_part_each_unless_the_engine_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(2, 1, 64, torch.float16, [(150, 130), (20, 3)], 32, pad=(3, 1), n_value=48)
    made, spec = make(case, CPU), spec_of(case, CPU)
    n = made.plain.n_row
    want = attend_ref.bind(spec)(made.q[:n].double(), made.pool, made.plain)
    monkeypatch.setattr(latent, "SPLIT", 2 * 128)
    with emulated_gpu():
        launch = latent.bind(spec)
        out = launch(made.q, made.pool, made.batch)
        assert worst(out[:n], want) < case.tolerance and not out[n:].any()
        launch.exact = True
        split = launch(made.q, made.pool, made.batch)
        q, batch = only(made, 0, 120, 4)
        assert torch.equal(launch(q, made.pool, batch), split[120:124])
    assert worst(split[:n], want) < case.tolerance and not torch.equal(split, out)


@pytest.mark.parametrize("page", [-1, 1 << 40, 99])
def test_a_wild_page_is_reported_and_other_sequences_are_right(page: int) -> None:
    case = Case(3, 1, 64, torch.float16, [(40, 2), (33, 3)], 16, spare=0, n_value=48)
    made = make(case, CPU)
    table = made.batch.page_table.clone()
    table[0, 1] = page
    with emulated_gpu():
        want = run(case, made, made.q, made.batch)
        got = run(case, made, made.q, replace(made.batch, page_table=table))
        index = page if page < 1 << 31 else -1
        assert faults.record(CPU).tolist() == [1, 4, 0, index, made.pool.n_row // 16]
        faults.record(CPU).zero_()
    assert torch.equal(got[2:], want[2:]) and not got.isnan().any()


def test_a_graphs_batch_of_padding_alone_and_no_rows_at_all() -> None:
    case = CASES["first token"]
    made = make(case, CPU)
    with emulated_gpu():
        idle = replace(
            made.batch,
            row_seq=torch.full_like(made.batch.row_seq, -1),
            seq_start=torch.full_like(made.batch.seq_start, 6),
            bucket=6,
        )
        assert not run(case, made, made.q, idle).any()
        filled = run(case, made, made.q, replace(made.batch, bucket=6))
        assert torch.equal(filled, run(case, made, made.q, made.batch))
        none = replace(
            made.plain,
            seqs=[],
            **{name: getattr(made.plain, name)[:0] for name in ("positions", "lo", "hi", "row_seq")},
        )
        assert run(case, made, made.q[:0], none).shape == (0, 3, 48)
        assert faults.record(CPU).tolist() == [0] * 5
