"""attend.cu, its merge and attend_plain.cu run thread by thread on the CPU, on smaller kin of attend_cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from sampling import few

from pyspec.cuda import faults
from pyspec.cuda.ops.attend import cuda as attend_cuda
from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend.cases import TOLERANCE, Case, make, only, spec_of, worst
from pyspec.slots.kv_types import Q4_0, Q4_1, Q5_0, Q5_1, KvType

pytestmark = [needs_compiler, pytest.mark.sampled(1)]
SEEDS = (0, 1)
F8 = torch.float8_e4m3fn
CASES = {
    "first token": Case(6, 1, 64, torch.float16, [(0, 1), (0, 5)]),
    "ragged": Case(6, 2, 128, torch.float16, [(0, 3), (255, 1), (127, 9), (1023, 2)], 32, pad=(5, 2)),
    "ragged bf16": Case(6, 1, 256, torch.bfloat16, [(17, 3), (700, 1)], 64, pad=(1, 1)),
    "heads of 512": Case(
        8, 1, 512, torch.float16, [(0, 1), (17, 3), (700, 1), (1100, 2)], 16, pad=(1, 1), scale=1.0
    ),
    "heads of 512, q8_0": Case(8, 1, 512, torch.int8, [(17, 3), (600, 1)], 16, 50),
    "group 16": Case(16, 1, 64, torch.bfloat16, [(130, 4), (300, 1), (3, 2)], 16),
    "one head a group": Case(2, 2, 64, torch.float16, [(70, 1), (200, 17), (63, 2)], 16),
    "drafter block": Case(8, 2, 64, torch.float16, [(1100, 8), (100, 8)], 16, 2048, True, (8, 1)),
    "small window": Case(8, 2, 64, torch.bfloat16, [(600, 5), (127, 2), (9, 4)], 16, 7),
    "window of one": Case(8, 2, 64, torch.float16, [(600, 5), (128, 1)], 16, 1),
    "wide rows": Case(6, 1, 64, torch.float16, [(40, 70), (0, 33)], 64, pad=(7, 1)),
    "f32": Case(6, 2, 64, torch.float32, [(100, 3), (33, 1)], 16, pad=(2, 1)),
    "odd size": Case(6, 2, 96, torch.float16, [(100, 3), (33, 1)], 16, 50),
    "odd size bf16": Case(2, 1, 32, torch.bfloat16, [(40, 2)], 16),
    "q8_0": Case(6, 2, 128, torch.int8, [(0, 3), (255, 1), (127, 9), (1023, 2)], 32, pad=(5, 2)),
    "q8_0 of 256": Case(6, 1, 256, torch.int8, [(17, 3), (300, 1), (15, 1)], 16, pad=(1, 1)),
    "q8_0 group 16": Case(16, 1, 64, torch.int8, [(130, 4), (300, 1), (3, 2)], 16),
    "q8_0 block": Case(8, 2, 64, torch.int8, [(1100, 8), (100, 8)], 16, 2048, True, (8, 1)),
    "q8_0 window": Case(2, 2, 64, torch.int8, [(600, 5), (127, 17), (9, 4)], 16, 7),
    "q8_0 odd size": Case(6, 2, 96, torch.int8, [(100, 3), (33, 1)], 16, 50, pad=(2, 1), sinks=True),
    "f8": Case(6, 2, 128, F8, [(0, 3), (255, 1), (127, 9), (1023, 2)], 32, pad=(5, 2)),
    "f8 of 256": Case(6, 1, 256, F8, [(17, 3), (300, 1)], 64, 19, pad=(1, 1)),
    "f8 wide rows": Case(6, 1, 64, F8, [(40, 70), (0, 33)], 64, pad=(7, 1)),
    "f8 odd size": Case(2, 1, 96, F8, [(40, 2)], 16),
    "sinks": Case(
        6, 2, 64, torch.float16, [(0, 1), (255, 5), (1100, 2)], 16, 128, pad=(2, 1), sinks=True
    ),
    "sinks q8_0": Case(16, 1, 128, torch.int8, [(0, 1), (300, 3)], 16, sinks=True),
    "keys alone": Case(6, 1, 96, torch.float16, [(100, 3), (33, 1)], 16, 50, sinks=True, keys_only=True),
    "keys alone of 64": Case(6, 1, 64, torch.float16, [(0, 1), (255, 5)], 16, keys_only=True),
    "q4_0": Case(6, 2, 128, Q4_0, [(0, 3), (255, 1), (127, 9), (1023, 2)], 32, pad=(5, 2)),
    "q4_1 of 256": Case(6, 1, 256, Q4_1, [(17, 3), (300, 1), (15, 1)], 16, pad=(1, 1)),
    "q5_0 of 64": Case(16, 1, 64, Q5_0, [(130, 4), (300, 1), (3, 2)], 16),
    "q5_1 window": Case(2, 2, 128, Q5_1, [(600, 5), (127, 17), (9, 4)], 16, 7),
    "q5_1 odd size": Case(6, 2, 96, Q5_1, [(100, 3), (33, 1)], 16, 50, pad=(2, 1), sinks=True),
    "q8_0 and q4_0": Case(6, 1, 256, torch.int8, [(17, 3), (300, 1)], 16, pad=(1, 1), v_dtype=Q4_0),
    "bf16 and q5_0": Case(6, 1, 128, torch.bfloat16, [(17, 3), (300, 1)], 16, sinks=True, v_dtype=Q5_0),
    "q5_1 and f16": Case(6, 1, 64, Q5_1, [(17, 3), (300, 1)], 16, v_dtype=torch.float16),
    "f16 and bf16": Case(6, 1, 64, torch.float16, [(17, 3), (300, 1)], 16, v_dtype=torch.bfloat16),
    "f8 and q4_1": Case(6, 1, 64, F8, [(17, 3), (300, 1)], 16, v_dtype=Q4_1),
    "f32 and q5_0": Case(6, 2, 96, torch.float32, [(100, 3), (33, 1)], 16, 50, v_dtype=Q5_0),
    "sinks f32": Case(6, 2, 96, torch.float32, [(100, 3), (33, 1)], 16, pad=(2, 1), sinks=True),
}
SOME = (
    "first token",
    "ragged",
    "ragged bf16",
    "heads of 512",
    "heads of 512, q8_0",
    "group 16",
    "small window",
    "f32",
    "odd size",
    "q8_0",
    "q8_0 block",
    "f8",
    "sinks",
    "q5_1 window",
    "q8_0 and q4_0",
)


@pytest.mark.sampled(most=3)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", few(CASES, *SOME))
def test_every_row_is_the_references_and_padding_comes_out_as_zeros(name: str, seed: int) -> None:
    case = CASES[name]
    made = make(case, CPU)
    n = made.plain.n_row
    want = attend_ref.bind(spec_of(case, CPU))(
        made.q[:n].double(), made.pool, made.plain, case.window, made.sinks
    )
    with emulated_gpu(seed=seed):
        out = attend_cuda.bind(spec_of(case, CPU))(
            made.q, made.pool, made.batch, case.window, made.sinks
        )
        assert faults.record(CPU).tolist() == [0] * 5
    assert worst(out[:n], want) < case.tolerance
    assert not out[n:].any()


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(
    "name", ["ragged", "one head a group", "odd size", "q8_0", "q8_0 odd size", "f8", "q4_0", "sinks"]
)
def test_a_row_has_the_same_bits_alone_and_in_any_company(name: str) -> None:
    case = CASES[name]
    made = make(case, CPU, seed=1)
    with emulated_gpu(seed=2):
        attend = attend_cuda.bind(spec_of(case, CPU))
        out = attend(made.q, made.pool, made.batch, case.window, made.sinks)
        for i, (_, width) in enumerate(case.seqs):
            start = made.plain.starts[i]
            for first, n in ((0, width), (width - 1, 1)):
                q, batch = only(made, i, first, n)
                alone = attend(q, made.pool, batch, case.window, made.sinks)
                assert torch.equal(out[start + first : start + first + n], alone), (name, i, first)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn, Q5_1])
def test_ranges_and_splits_as_items_give_the_same_bits(dtype: torch.dtype | KvType) -> None:
    case = Case(4, 1, 64, dtype, [(1200, 2), (1500, 2)], 16)
    made, found = make(case, CPU), []
    for n_multiprocessor, per_item in ((1, 16), (40, 1)):
        with emulated_gpu(seed=3, n_multiprocessor=n_multiprocessor):
            shape = replace(attend_cuda.shape_for(64, 1, case.kv, "sm_90a"), blocks=1)
            found.append(
                attend_cuda.bind(spec_of(case, CPU), shape=shape)(made.q, made.pool, made.batch, 0)
            )
            assert int(attend_cuda.workspace(CPU).plan[0]) == per_item
    assert torch.equal(*found)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("dim", [64, 256])
def test_all_ways_to_put_partials_together_give_the_same_bits(
    dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warp for 32 dims, for 128, and with fewer partials under way; more of them than a batch has."""
    case, found, merge = (
        Case(4, 2, dim, torch.float16, [(2500, 1), (40, 2)], 16),
        [],
        attend_cuda.Kernels.merge,
    )
    made = make(case, CPU)
    for i, n_part in enumerate((1, attend_cuda.WIDE_WARPS, 10 * attend_cuda.WIDE_WARPS)):
        monkeypatch.setattr(attend_cuda, "MERGE_FINDS", (1, 7, 0)[i])
        monkeypatch.setattr(
            attend_cuda.Kernels, "merge", lambda k, _, dim, n=n_part: merge(k, n // (dim // 32), dim)
        )
        with emulated_gpu(seed=3):
            found.append(attend_cuda.bind(spec_of(case, CPU))(made.q, made.pool, made.batch, 0))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("name", ["ragged", "sinks", "small window", "q5_1 window"])
def test_a_row_has_the_same_bits_whoever_finds_its_partials(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, found = CASES[name], []
    made = make(case, CPU)
    for finds in (0, 1):
        monkeypatch.setattr(attend_cuda, "MERGE_FINDS", finds)
        with emulated_gpu(seed=3 + finds, n_multiprocessor=3 + 9 * finds):
            attend = attend_cuda.bind(spec_of(case, CPU))
            found.append(attend(made.q, made.pool, made.batch, case.window, made.sinks))
            assert faults.record(CPU).tolist() == [0] * 5
    assert torch.equal(found[0], found[1])


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_blocks_of_four_columns_give_the_bits_of_those_of_eight(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen for many sequences of few columns; and what a graph of them replays for wider ones, in more tiles."""
    few = Case(4, 2, 256, dtype, [(700, 1), (0, 2), (1100, 1)], 16, 900, pad=(1, 1))
    wide = replace(few, seqs=[(17, 5), (300, 1)])
    made, found, chosen = [make(few, CPU, 7), make(wide, CPU, 8)], [], []
    shape = attend_cuda.narrow_for(spec_of(few, CPU), "sm_90a")
    for n_block in (attend_cuda.ITS_BLOCKS, 0):
        monkeypatch.setattr(attend_cuda, "ITS_BLOCKS", n_block)
        with emulated_gpu(seed=3, n_multiprocessor=1):
            own = attend_cuda.bind(spec_of(few, CPU))
            chosen.append(own._build(made[0].batch, 2).shape.narrow)
            found.append(own(made[0].q, made[0].pool, made[0].batch, few.window))
            forced = attend_cuda.bind(spec_of(wide, CPU), shape=shape if n_block else None)
            found.append(forced(made[1].q, made[1].pool, made[1].batch, wide.window))
    assert chosen == [True, False]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    want = attend_ref.bind(spec_of(few, CPU))(
        made[0].q[:4].double(), made[0].pool, made[0].plain, few.window
    )
    assert worst(found[0][:4], want) < few.tolerance and not found[0][4:].any()


@pytest.mark.slow
def test_more_splits_than_a_warp_has_lanes() -> None:
    """As many as are put together at once, and the rest behind them."""
    case = Case(1, 1, 64, torch.float16, [(36 * 1024 - 9, 1)], 16)
    made = make(case, CPU)
    want = attend_ref.bind(spec_of(case, CPU))(made.q.double(), made.pool, made.plain)
    with emulated_gpu(seed=3, n_multiprocessor=2):
        got = attend_cuda.bind(spec_of(case, CPU))(made.q, made.pool, made.batch, 0)
        assert int(attend_cuda.workspace(CPU).plan[0]) == 16
    assert worst(got, want) < TOLERANCE[case.dtype]


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("name", ["ragged", "q8_0", "f8"])
@pytest.mark.parametrize("arch", [(8, 0), (8, 6), (12, 0)])
def test_other_architectures_builds_give_the_same_rows(arch: tuple[int, int], name: str) -> None:
    case = CASES[name]
    made = make(case, CPU)
    want = attend_ref.bind(spec_of(case, CPU))(
        made.q[: made.plain.n_row].double(), made.pool, made.plain, 0
    )
    with emulated_gpu(arch, seed=4):
        out = attend_cuda.bind(spec_of(case, CPU))(made.q, made.pool, made.batch, 0)
    assert worst(out[: made.plain.n_row], want) < TOLERANCE[case.dtype]


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("name", ["ragged", "f32", "q8_0"])
@pytest.mark.parametrize("bad", [-1, 1000, 1 << 40])
def test_a_page_that_does_not_exist_is_reported_and_other_rows_are_right(name: str, bad: int) -> None:
    case = CASES[name]
    made = make(case, CPU)
    for plane in made.pool.planes:  # the page that is read instead may have no owner
        if plane.dtype is not torch.int8:
            plane[plane.isnan()] = 0
    n = made.plain.n_row
    want = attend_ref.bind(spec_of(case, CPU))(
        made.q[:n].double(), made.pool, made.plain, case.window, made.sinks
    )
    made.batch.page_table[1, 0] = bad
    with emulated_gpu(seed=5):
        out = attend_cuda.bind(spec_of(case, CPU))(
            made.q, made.pool, made.batch, case.window, made.sinks
        )
        fault, n_page = faults.record(CPU).tolist(), made.pool.k.shape[0] // case.page_size
    assert fault == [1, attend_cuda.OP_ID, 1, bad if bad < 1 << 31 else -1, n_page]
    others = [i for i in range(n) if not made.plain.starts[1] <= i < made.plain.starts[2]]
    assert worst(out[others], want[others]) < TOLERANCE[case.dtype] and bool(out.isfinite().all())
