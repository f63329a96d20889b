"""attend.cu, its merge and attend_plain.cu on every machine and for every architecture; the reference by the formula; the check."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import attend_cases
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
from machines import CPU, NO_FAULT, ON_CARD, Machine, cases, compiled
from sampling import few, slow
from torch import Tensor

from pyspec.cuda import jit
from pyspec.cuda.ops.attend import cuda as attend_cuda
from pyspec.cuda.ops.attend import prompt as attend_prompt
from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend.cases import Case, make, only, spec_of, worst
from pyspec.cuda.ops.attend.op import check
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.cuda.ops.rope_kv import cuda as rope_kv_cuda
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
from pyspec.slots.arena import bucket_of
from pyspec.slots.batch import Batch, Seq, SeqMode
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_types import PLAIN, Q4_0, Q4_1, Q5_0, Q5_1, TYPES, KvType

pytestmark = pytest.mark.sampled(1)

SEQS = [(0, 3), (40, 1), (21, 9)]
PAIRS = [
    KvFormat.named(k, v)
    for k, v in (("f16", "q8_0"), ("q8_0", "f16"), ("f8_e4m3", "bf16"), ("f32", "f8_e4m3"))
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("window", "block", "cap"),
    [(0, False, 0.0), (7, False, 2.0), (-8, False, 0.0), (0, True, 1.5), (16, True, 0.0)],
)
@pytest.mark.parametrize("kv", [*map(KvFormat.both, TYPES.values()), *PAIRS], ids=lambda kv: kv.name)
def test_rows_are_weighted_means_of_what_they_see(
    kv: KvFormat, window: int, block: bool, cap: float, sinks: bool
) -> None:
    case = Case(6, 2, 64, kv.k, SEQS, 16, window, block, sinks=sinks, cap=cap, v_dtype=kv.v)
    made = make(case, CPU)
    b, spec = made.plain, spec_of(case, CPU)
    got = attend_ref.bind(spec)(made.q, made.pool, b, window, made.sinks)
    for s, seq in enumerate(b.seqs):
        k, v = made.pool.read(attend_ref.key_rows(b, s), torch.float64)
        for i in range(b.starts[s], b.starts[s + 1]):
            p = seq.n_past + i - b.starts[s]
            first = max(0, p - window + 1) if window > 0 else p // 8 * 8 if window else 0
            end = seq.n_past + seq.width if block else p + 1
            for head in range(6):
                logits = (k[first:end, head // 3] @ made.q[i, head].double()) / math.sqrt(64)
                weights = (cap * (logits / cap).tanh() if cap else logits).exp()
                below = weights.sum() + (
                    made.sinks[head].double().exp() if made.sinks is not None else 0
                )
                want = weights @ v[first:end, head // 3] / below
                assert (got[i, head] - want).norm() < 2e-6 * max(1, want.norm()), (s, i, head)


def test_a_sink_of_minus_infinity_changes_nothing_and_a_large_one_takes_all() -> None:
    case = Case(4, 2, 64, torch.float16, SEQS, 16, sinks=True)
    made = make(case, CPU)
    attend = attend_ref.bind(spec_of(case, CPU))
    none = attend(made.q, made.pool, made.plain, 0, torch.full((4,), -torch.inf))
    assert torch.allclose(none, attend(made.q, made.pool, made.plain, 0), atol=1e-6)
    assert attend(made.q, made.pool, made.plain, 0, torch.full((4,), 1e4)).abs().max() == 0


SPEC = AttendSpec(torch.device("cpu"), 6, 1, 64, 0.125)
REFERENCE = attend_ref.bind(SPEC)


def test_the_reference_passes_its_own_check() -> None:
    assert check(REFERENCE, REFERENCE, SPEC) is None


def test_a_launch_that_forgets_the_window_is_refused() -> None:
    def forgets(q: Tensor, pool: KVPool, batch: Batch, window: int, sinks: object) -> Tensor:
        return REFERENCE(q, pool, batch, 0)

    assert "differs" in (check(forgets, REFERENCE, SPEC) or "")


def test_a_launch_that_reads_what_nobody_wrote_is_refused() -> None:
    def leaks(q: Tensor, pool: KVPool, batch: Batch, window: int, sinks: object) -> Tensor:
        return REFERENCE(q, pool, batch, window) + 0 * pool.v.sum()

    assert "differs from the reference by inf" in (check(leaks, REFERENCE, SPEC) or "")


F8 = torch.float8_e4m3fn
SEEING = [(70, 1), (9, 31), (1011, 13)]
PICTURES = (1, 9, 21), (1, 21, 22), (1, 24, 40), (2, 1000, 1015), (2, 1017, 1024)
CASES = {
    "first token": Case(6, 1, 64, torch.float16, [(0, 1), (0, 5)]),
    "ragged": Case(6, 2, 128, torch.float16, [(0, 3), (255, 1), (127, 9), (1023, 2)], 32, pad=(5, 2)),
    "ragged bf16": Case(6, 1, 256, torch.bfloat16, [(17, 3), (700, 1)], 64, pad=(1, 1)),
    "heads of 512": Case(8, 1, 512, torch.float16, [(0, 1), (17, 3), (700, 1), (1100, 2)], 16, pad=(1, 1), scale=1.0),
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
    "sinks": Case(6, 2, 64, torch.float16, [(0, 1), (255, 5), (1100, 2)], 16, 128, pad=(2, 1), sinks=True),
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
    "capped bf16, sinks": Case(8, 2, 64, torch.bfloat16, [(300, 8), (9, 8)], 16, 0, True, (8, 1), sinks=True, cap=1.5),
    "capped q8_0": Case(6, 2, 128, torch.int8, [(17, 3), (300, 1)], 16, cap=2.0),
    "capped f32": Case(6, 2, 96, torch.float32, [(100, 3), (33, 1)], 16, 50, pad=(2, 1), cap=2.0),
    "pictures": Case(8, 2, 64, torch.float16, SEEING, 16, pad=(3, 1), pictures=PICTURES),
    "pictures in windows": Case(8, 4, 128, torch.bfloat16, SEEING, 32, 7, pictures=PICTURES),
    "pictures in q8_0": Case(6, 1, 256, torch.int8, SEEING, 16, 20, pad=(1, 1), pictures=PICTURES),
    "pictures in q4_0": Case(6, 2, 128, Q4_0, SEEING, 16, 20, pictures=PICTURES),
    "pictures in f32": Case(6, 2, 96, torch.float32, SEEING, 16, 11, pictures=PICTURES),
    "sinks f32": Case(6, 2, 96, torch.float32, [(100, 3), (33, 1)], 16, pad=(2, 1), sinks=True),
}  # fmt: skip
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
    "pictures",
    "pictures in windows",
    "sinks",
    "capped",
    "capped f32",
    "q5_1 window",
    "q8_0 and q4_0",
)


OF_A_CARD = attend_cases.CASES | attend_cases.MIXED | attend_cases.PACKED


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
    case, found = Case(4, 2, dim, torch.float16, [(2500, 1), (40, 2)], 16), []
    merge = attend_cuda.Kernels.merge
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
        machine, attend_cuda.bind, attend_cuda.GUARD.number, case_of(machine, name), seq, column, page
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
    attend = attend_cuda.bind(spec_of(case, machine.device))
    angles = (at.new_empty(n, 1, 0).float(),) * 2
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


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_kernels_compile_without_spills_in_the_registers_their_blocks_leave(arch: str) -> None:
    dim, n_tile, kv = (256, 1, "f16") if arch in ("sm_80", "sm_100a") else (256, 6, "bf16")
    for cap in (0.0, 50.0):
        assert_fits(attend_cuda.shape_for(dim, n_tile, KvFormat.named(kv), arch, cap=cap))


@pytest.mark.slow
@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize(
    "kv", [("q8_0",), ("f8_e4m3",), ("q4_0",), ("q5_1",), ("q8_0", "q4_0"), ("bf16", "q4_1")]
)
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_kernels_that_read_bytes_compile_without_spills_in_the_registers_their_blocks_leave(
    arch: str, kv: tuple[str, ...]
) -> None:
    """With a sink, and in the builds that have least registers to spare."""
    for dim, n_tile in ((64, 3), (128, 3), (256, 1)):
        assert_fits(attend_cuda.shape_for(dim, n_tile, KvFormat.named(*kv), arch, has_sinks=True))


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["f16", "bf16"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_four_blocks_of_few_columns_compile_without_spills(arch: str, kv: str) -> None:
    spec = AttendSpec(torch.device("cpu"), 32, 16, 256, 1.0, KvFormat.named(kv), has_sinks=True)
    shape = attend_cuda.narrow_for(spec, arch)
    assert shape is not None and shape.resident == 4
    assert_fits(shape)


def test_blocks_of_few_columns_are_for_heads_that_fill_them_on_large_multiprocessors() -> None:
    def of(*heads: int, kv: str = "f16", arch: str = "sm_90a") -> attend_cuda.AttendBuild | None:
        spec = AttendSpec(torch.device("cpu"), *heads, 1.0, KvFormat.named(kv))
        return attend_cuda.narrow_for(spec, arch)

    assert of(32, 16, 256) is not None and of(16, 4, 256, kv="bf16") is not None
    refused = [
        of(24, 4, 256),
        of(32, 16, 128),
        of(32, 16, 256, kv="q8_0"),
        of(32, 16, 256, arch="sm_86"),
    ]
    assert refused == [None] * 4


def assert_fits(shape: attend_cuda.AttendBuild) -> None:
    found = compiled("attend", shape.arch, shape.defines())
    assert set(found) == {"attend_split", "attend_merge_thin", "attend_merge_long", "attend_merge_wide"}
    assert found["attend_split"].registers * 32 * shape.warps * shape.blocks <= 65536, (shape, found)


@pytest.mark.slow
@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("kv", ["bf16", "q8_0", "f8_e4m3"])
@pytest.mark.parametrize("n_tile", attend_cuda.ITS_TILES)
def test_kernels_of_the_widest_heads_compile_without_spills(n_tile: int, kv: str) -> None:
    shape = attend_cuda.shape_for(attend_cuda.WIDEST, n_tile, KvFormat.named(kv), "sm_90a")
    assert_fits(shape)
    assert shape.shared_bytes <= attend_cuda.room_of("sm_90a") - 1024


def test_small_gpus_run_the_widest_heads_in_the_plain_kernel() -> None:
    wide = AttendSpec(torch.device("cpu"), 8, 1, attend_cuda.WIDEST, 1.0)
    assert attend_cuda.tiles_of(wide, "sm_90a") == attend_cuda.ITS_TILES
    assert attend_cuda.tiles_of(wide, "sm_86") == () == attend_cuda.tiles_of(wide, "sm_80")


@pytest.mark.parametrize("arch", jit.ARCHS)
def test_shared_memory_of_every_build_fits_the_multiprocessor(arch: str) -> None:
    room = attend_cuda.room_of(arch)
    for dim in attend_cuda.DIMS:
        for n_tile in attend_cuda.N_TILES:
            for kv in map(KvFormat.both, TYPES.values()):
                shape = attend_cuda.shape_for(dim, n_tile, kv, arch)
                assert shape.shared_bytes <= room - 1024, shape
                assert room > 100 * 1024 or shape.shared_bytes <= 99 * 1024, shape


@pytest.mark.parametrize("of", TYPES.values(), ids=str)
def test_the_plain_kernel_compiles_for_every_type(of: KvType) -> None:
    for cap in (0.0, 50.0):
        spec = AttendSpec(torch.device("cpu"), 6, 2, 96, 1.0, KvFormat(of, TYPES["q5_1"]), cap=cap)
        compiled("attend_plain", "sm_80", attend_cuda.plain_defines(spec))


@pytest.mark.parametrize(
    ("columns", "n_tile"),
    [(1, 1), (6, 1), (16, 2), (24, 3), (48, 6), (64, 4), (96, 6), (256, 6), (40, 6)],
)
def test_columns_are_packed_into_the_fewest_and_then_narrowest_tiles(columns: int, n_tile: int) -> None:
    assert attend_cuda.n_tile_for(columns) == n_tile


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("heads", [(24, 4, 256), (32, 2, 128), (4, 4, 64), (6, 2, 64), (64, 1, 256)])
def test_what_is_planned_for_partial_sums_is_enough_for_every_batch(heads: tuple[int, int, int]) -> None:
    """Of slots that decode, verify and read prompts at once, and of graphs; and it is not far more than that."""
    rng, n_sm, arch = random.Random(1), 132, "sm_90a"
    spec = AttendSpec(torch.device("cpu"), *heads, 1.0)
    group, found = heads[0] // heads[1], []
    for n_seq, n_key, width in ((1, 2048, 4), (8, 24_600, 7), (8, 2600, 17), (3, 262_144, 1)):
        graph_row = bucket_of(n_seq * width) or 128
        planned = attend_cuda.most_floats(
            spec, n_seq, n_key, max(width, -(-graph_row // n_seq)), arch, n_sm
        )
        most = 0
        for i in range(3000):
            kept = [rng.random() < rng.choice((0.1, 0.9)) for _ in range(n_seq)]
            seqs = [
                Seq(
                    s,
                    0,
                    [0] * (rng.randint(1, 400) if keep else width),
                    mode=SeqMode.KEEP if keep else SeqMode.VERIFY,
                )
                for s, keep in enumerate(kept)
            ]
            ends = [rng.choice((n_key, rng.randint(q.width, n_key))) for q in seqs]
            own = [
                (q.width, end)
                for q, end in zip(seqs, ends, strict=True)
                if not attend_prompt.is_long(q, end)
            ]
            shape = attend_cuda.shape_for(
                heads[2],
                attend_cuda.n_tile_for(max((w for w, _ in own), default=1) * group),
                PLAIN,
                arch,
            )
            tiles = [(-(-w * group // shape.columns), end) for w, end in own]
            if i == 0:  # a graph
                shape = attend_cuda.shape_for(heads[2], 6, PLAIN, arch)
                tiles = [(graph_row * group // shape.columns + n_seq, n_key)]
            n_item = attend_cuda.n_items(spec, shape.columns, n_sm * shape.resident, tiles)
            most = max(most, n_item * attend_cuda.n_float(spec, shape.columns))
        found.append(most / planned)
    assert all(0.2 < part <= 1 for part in found), found


def test_nothing_is_planned_for_what_needs_no_partial_sums() -> None:
    assert attend_cuda.workspace_bytes(AttendSpec(torch.device("cpu"), 8, 2, 64, 1.0), 8, 4096, 4) == 0
