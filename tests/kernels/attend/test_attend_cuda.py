"""attend.cu, its merge and attend_plain.cu: thread by thread on the CPU, on smaller kin of attend_cases, and on a card."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attend_checks import (
    check_company,
    check_graph,
    check_large_pool,
    check_rows,
    check_rows_without_keys,
    check_wild_page,
    run,
    wanted,
)
from machines import CPU, NO_FAULT, ON_CARD, Machine, cases
from sampling import few, slow

from pyspec.cuda.ops.attend import cases as attend_cases
from pyspec.cuda.ops.attend import cuda as attend_cuda
from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend.cases import MIXED, PACKED, Case, make, only, spec_of, worst
from pyspec.cuda.ops.rope_kv import cuda as rope_kv_cuda
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
from pyspec.slots.kv_types import Q4_0, Q4_1, Q5_0, Q5_1, KvType

pytestmark = pytest.mark.sampled(1)
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
    "chunks": Case(8, 2, 64, torch.float16, [(600, 5), (127, 2), (40, 17)], 16, -48),
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
    "capped": Case(4, 2, 256, torch.float16, [(300, 3), (0, 1), (1100, 1)], 16, 70, pad=(2, 1), cap=3.0),
    "capped bf16, sinks": Case(
        8, 2, 64, torch.bfloat16, [(300, 8), (9, 8)], 16, 0, True, (8, 1), sinks=True, cap=1.5
    ),
    "capped q8_0": Case(6, 2, 128, torch.int8, [(17, 3), (300, 1)], 16, cap=2.0),
    "capped f32": Case(6, 2, 96, torch.float32, [(100, 3), (33, 1)], 16, 50, pad=(2, 1), cap=2.0),
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
    "chunks",
    "f32",
    "odd size",
    "q8_0",
    "q8_0 block",
    "f8",
    "sinks",
    "capped",
    "capped f32",
    "q5_1 window",
    "q8_0 and q4_0",
)


OF_A_CARD = attend_cases.CASES | MIXED | PACKED


def case_of(machine: Machine, name: str) -> Case:
    return (CASES if machine.name == "emulated" else OF_A_CARD)[name]


@pytest.mark.sampled(most=3)
@cases("name", emulated=few(CASES, *SOME), card=OF_A_CARD, seeds=(0, 1))
def test_every_row_is_the_references_and_padding_comes_out_as_zeros(machine: Machine, name: str) -> None:
    check_rows(machine, attend_cuda.bind, case_of(machine, name))


@pytest.mark.sampled(most=1)
@cases(
    "name",
    emulated=["ragged", "one head a group", "odd size", "q8_0", "q8_0 odd size", "f8", "q4_0", "sinks"],
    card=[n for n, c in OF_A_CARD.items() if len(c.seqs) > 1],
)
def test_a_row_has_the_same_bits_alone_and_in_any_company(machine: Machine, name: str) -> None:
    check_company(machine, attend_cuda.bind, case_of(machine, name), seed=1)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn, Q5_1])
def test_ranges_and_splits_as_items_give_the_same_bits(
    machine: Machine, dtype: torch.dtype | KvType
) -> None:
    case = Case(4, 1, 64, dtype, [(1200, 2), (1500, 2)], 16)
    made, found = make(case, CPU), []
    for n_multiprocessor, per_item in ((1, 16), (40, 1)):
        with machine.started(seed=3, n_multiprocessor=n_multiprocessor):
            shape = replace(attend_cuda.shape_for(64, 1, case.kv, "sm_90a"), blocks=1)
            found.append(
                attend_cuda.bind(spec_of(case, CPU), shape=shape)(made.q, made.pool, made.batch, 0)
            )
            assert int(attend_cuda.workspace(CPU).plan[0]) == per_item
    assert torch.equal(*found)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("dim", [64, 256])
def test_all_ways_to_put_partials_together_give_the_same_bits(
    machine: Machine, dim: int, monkeypatch: pytest.MonkeyPatch
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
        with machine.started(seed=3):
            found.append(attend_cuda.bind(spec_of(case, CPU))(made.q, made.pool, made.batch, 0))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("name", ["ragged", "sinks", "small window", "q5_1 window"])
def test_a_row_has_the_same_bits_whoever_finds_its_partials(
    machine: Machine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, found = CASES[name], []
    made = make(case, CPU)
    for finds in (0, 1):
        monkeypatch.setattr(attend_cuda, "MERGE_FINDS", finds)
        with machine.started(seed=3 + finds, n_multiprocessor=3 + 9 * finds):
            attend = attend_cuda.bind(spec_of(case, CPU))
            found.append(run(attend, case, made))
            assert machine.faults().tolist() == NO_FAULT
    assert torch.equal(found[0], found[1])


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_blocks_of_four_columns_give_the_bits_of_those_of_eight(
    machine: Machine, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen for many sequences of few columns; and what a graph of them replays for wider ones, in more tiles."""
    few = Case(4, 2, 256, dtype, [(700, 1), (0, 2), (1100, 1)], 16, 900, pad=(1, 1))
    wide = replace(few, seqs=[(17, 5), (300, 1)])
    made, found, chosen = [make(few, CPU, 7), make(wide, CPU, 8)], [], []
    shape = attend_cuda.narrow_for(spec_of(few, CPU), "sm_90a")
    for n_block in (attend_cuda.ITS_BLOCKS, 0):
        monkeypatch.setattr(attend_cuda, "ITS_BLOCKS", n_block)
        with machine.started(seed=3, n_multiprocessor=1):
            own = attend_cuda.bind(spec_of(few, CPU))
            chosen.append(own._build(made[0].batch, 2).shape.narrow)
            found.append(own(made[0].q, made[0].pool, made[0].batch, few.window))
            forced = attend_cuda.bind(spec_of(wide, CPU), shape=shape if n_block else None)
            found.append(forced(made[1].q, made[1].pool, made[1].batch, wide.window))
    assert chosen == [True, False]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    want = wanted(few, made[0])
    assert worst(found[0][:4], want) < few.tolerance and not found[0][4:].any()


@pytest.mark.slow
def test_more_splits_than_a_warp_has_lanes(machine: Machine) -> None:
    """As many as are put together at once, and the rest behind them."""
    case = Case(1, 1, 64, torch.float16, [(36 * 1024 - 9, 1)], 16)
    made = make(case, CPU)
    want = wanted(case, made)
    with machine.started(seed=3, n_multiprocessor=2):
        got = attend_cuda.bind(spec_of(case, CPU))(made.q, made.pool, made.batch, 0)
        assert int(attend_cuda.workspace(CPU).plan[0]) == 16
    assert worst(got, want) < case.tolerance


@cases(
    "capability, name",
    emulated=[(of, name) for of in ((8, 0), (8, 6), (12, 0)) for name in ("ragged", "q8_0", "f8")],
    slow=True,
)
@pytest.mark.sampled(most=1)
def test_other_architectures_builds_give_the_same_rows(
    machine: Machine, capability: tuple[int, int], name: str
) -> None:
    check_rows(machine, attend_cuda.bind, CASES[name], capability=capability, seed=0)


@pytest.mark.sampled(2, most=2)
@cases(
    "name, seq, column, page",
    emulated=[(name, 1, 0, page) for name in ("ragged", "f32", "q8_0") for page in (-1, 1000, 1 << 40)],
    card=[("ragged", 4, 3, 1 << 33)],
)
def test_a_page_that_does_not_exist_is_reported_and_other_rows_are_right(
    machine: Machine, name: str, seq: int, column: int, page: int
) -> None:
    check_wild_page(
        machine, attend_cuda.bind, attend_cuda.OP_ID, case_of(machine, name), seq, column, page
    )


@cases("name, row", emulated=[("group 16", 2)], card=[("group 16", 2)])
def test_rows_without_keys_come_out_as_zeros(machine: Machine, name: str, row: int) -> None:
    check_rows_without_keys(machine, attend_cuda.bind, case_of(machine, name), row)


@cases(
    "case, shifts",
    emulated=[slow(Case(4, 2, 64, torch.float16, [(600, 4), (400, 4)], 16), (0, -1, -399))],
    card=[(Case(24, 4, 256, torch.float16, [(2000, 4), (1500, 4)], 16), (0, -1, -700, -1499))],
)
def test_a_captured_graph_serves_batches_of_other_lengths(
    machine: Machine, case: Case, shifts: tuple[int, ...]
) -> None:
    check_graph(machine, attend_cuda.bind, case, shifts)


@ON_CARD
def test_ranges_and_splits_as_items_of_long_sequences_give_the_same_bits(machine: Machine) -> None:
    case = Case(24, 4, 256, torch.float16, [(9000 + 77 * i, 16) for i in range(12)], 64)
    made, found = make(case, machine.device), []
    attend = attend_cuda.bind(spec_of(case, machine.device))
    for q, batch in ((made.q, made.batch), only(made, 5)):
        found.append(
            (attend(q, made.pool, batch, 0), int(attend_cuda.workspace(machine.device).plan[0]))
        )
    (out, several), (alone, one) = found
    assert (several, one) == (4, 1) and torch.equal(alone, out[80:96])


@ON_CARD
def test_many_sequences_have_the_bits_that_each_has_alone(machine: Machine) -> None:
    """Of few heads, four blocks of a multiprocessor have them, alone three."""
    case = Case(32, 16, 256, torch.bfloat16, [(i * 37, 1) for i in range(37)], 16, 600)
    made = make(case, machine.device)
    attend = attend_cuda.bind(spec_of(case, machine.device))
    assert isinstance(attend, attend_cuda.AttendLaunch)
    out = run(attend, case, made, None, made.plain)
    for i in (0, 5, 36):
        assert torch.equal(out[i : i + 1], run(attend, case, made, *only(made, i))), i


@ON_CARD
def test_pools_beyond_two_gigarows_of_bytes_are_addressed(machine: Machine) -> None:
    check_large_pool(machine, attend_cuda.bind)


@ON_CARD
def test_lower_bounds_hold_row_by_row(machine: Machine) -> None:
    case = OF_A_CARD["drafter block"]
    made = make(case, machine.device)
    for plane in made.pool.planes:
        plane[plane.isnan()] = 0  # behind the case's own windows
    lo = torch.arange(made.plain.n_row, device=machine.device) * 37 % 90
    b, plain = replace(made.batch, lo=torch.cat([lo, lo[:16]])), replace(made.plain, lo=lo)
    spec = spec_of(case, machine.device)
    want = attend_ref.bind(spec)(made.q[:48].double(), made.pool, plain, 0)
    assert worst(attend_cuda.bind(spec)(made.q, made.pool, b, 0)[:48], want) < 2e-3


@cases("heads", card=[(8, 4, 64), (32, 16, 256), (32, 4, 512)])
def test_keys_of_the_launch_before_are_seen(machine: Machine, heads: tuple[int, int, int]) -> None:
    """New keys come from the launch right before, in a graph, over and over; sequences enough for each build."""
    case = Case(*heads, torch.float16, [(i * 11, 1 + i % 2) for i in range(33)], 16)
    made, n_kv, dim = make(case, machine.device), heads[1], heads[2]
    b, n = made.plain, made.plain.n_row
    seq, at = b.row_seq.long(), b.positions
    rows = b.page_table[seq, at // 16] * 16 + at % 16
    rope = rope_kv_cuda.bind(
        RopeKvSpec(machine.device, heads[0], n_kv, dim, 0, True, False, False, 1e-6)
    )
    attend, angles = (
        attend_cuda.bind(spec_of(case, machine.device)),
        (at.new_empty(n, 1, 0).float(),) * 2,
    )
    y = torch.randn(n, (heads[0] + 2 * n_kv) * dim, device=machine.device)

    def both() -> torch.Tensor:
        for _ in range(3):  # the last keys count
            q = rope(y, None, None, angles, made.pool, rows)
            out = attend(q, made.pool, b, 0)
        return out

    replay, out = machine.captured(both)
    for seed in range(20):
        y.copy_(torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)))
        replay()
        got = out.clone()
        q = rope(y, None, None, angles, made.pool, rows)
        machine.waited()
        assert torch.equal(got, attend(q, made.pool, b, 0)), seed
