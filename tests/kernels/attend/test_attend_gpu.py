"""attend_cuda against the reference, on a GPU."""

from dataclasses import replace

import pytest
import torch

from pyspec.cuda import faults
from pyspec.cuda.ops.attend import cases as attend_cases
from pyspec.cuda.ops.attend import cuda as attend_cuda
from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend.cases import MIXED, PACKED, TOLERANCE, Case, make, only, spec_of, worst
from pyspec.cuda.ops.rope_kv import cuda as rope_kv_cuda
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec

GPU = torch.device("cuda", 0)
CASES = attend_cases.CASES | MIXED | PACKED


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_the_references_and_padding_comes_out_as_zeros(name: str) -> None:
    case = CASES[name]
    made = make(case, GPU)
    n = made.plain.n_row
    want = attend_ref.bind(spec_of(case, GPU))(
        made.q[:n].double(), made.pool, made.plain, case.window, made.sinks
    )
    attend = attend_cuda.bind(spec_of(case, GPU))
    out = attend(made.q, made.pool, made.batch, case.window, made.sinks)
    assert worst(out[:n], want) < case.tolerance
    assert not out[n:].any()
    assert torch.equal(out, attend(made.q, made.pool, made.batch, case.window, made.sinks))
    assert faults.record(GPU).tolist() == [0] * 5


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if len(c.seqs) > 1])
def test_a_row_has_the_same_bits_alone_and_in_any_company(name: str) -> None:
    case = CASES[name]
    made = make(case, GPU, seed=1)
    attend = attend_cuda.bind(spec_of(case, GPU))
    out = attend(made.q, made.pool, made.batch, case.window, made.sinks)
    for i, (_, width) in enumerate(case.seqs):
        start = made.plain.starts[i]
        q, batch = only(made, i)
        assert torch.equal(
            out[start : start + width], attend(q, made.pool, batch, case.window, made.sinks)
        ), (name, i)
        for row in {0, width // 2, width - 1}:
            q, batch = only(made, i, row, 1)
            assert torch.equal(
                out[start + row], attend(q, made.pool, batch, case.window, made.sinks)[0]
            ), (
                name,
                i,
                row,
            )


def test_ranges_and_splits_as_items_give_the_same_bits() -> None:
    case = Case(24, 4, 256, torch.float16, [(9000 + 77 * i, 16) for i in range(12)], 64)
    made = make(case, GPU)
    attend = attend_cuda.bind(spec_of(case, GPU))
    out = attend(made.q, made.pool, made.batch, 0)
    assert int(attend_cuda.workspace(GPU).plan[0]) == 4
    q, batch = only(made, 5)
    alone = attend(q, made.pool, batch, 0)
    assert int(attend_cuda.workspace(GPU).plan[0]) == 1
    assert torch.equal(alone, out[80:96])


def test_a_captured_graph_serves_batches_of_other_lengths() -> None:
    case = Case(24, 4, 256, torch.float16, [(2000, 4), (1500, 4)], 16)
    made = make(case, GPU)
    attend = attend_cuda.bind(spec_of(case, GPU))
    attend(made.q, made.pool, made.batch, 0)
    b = replace(made.batch, hi=made.batch.hi.clone(), positions=made.batch.positions.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(made.q, made.pool, b, 0)
    for shift in (0, -1, -700, -1499):
        b.hi.copy_(made.batch.hi + shift)
        b.positions.copy_(made.batch.positions + shift)
        graph.replay()
        torch.cuda.synchronize()
        now = replace(made.plain, hi=b.hi, positions=b.positions)
        want = attend_ref.bind(spec_of(case, GPU))(made.q.double(), made.pool, now, 0)
        assert worst(out, want) < TOLERANCE[case.dtype], shift


@pytest.mark.parametrize("heads", [(8, 4, 64), (32, 16, 256), (32, 4, 512)])
def test_keys_of_the_launch_before_are_seen(heads: tuple[int, int, int]) -> None:
    """New keys come from the launch right before, in a graph, over and over; sequences enough for each build."""
    case = Case(*heads, torch.float16, [(i * 11, 1 + i % 2) for i in range(33)], 16)
    made, n_kv, dim = make(case, GPU), heads[1], heads[2]
    b, n = made.plain, made.plain.n_row
    seq, at = b.row_seq.long(), b.positions
    rows = b.page_table[seq, at // 16] * 16 + at % 16
    rope = rope_kv_cuda.bind(RopeKvSpec(GPU, heads[0], n_kv, dim, 0, True, False, False, 1e-6))
    attend, angles = attend_cuda.bind(spec_of(case, GPU)), (at.new_empty(n, 1, 0).float(),) * 2
    y = torch.randn(n, (heads[0] + 2 * n_kv) * dim, device=GPU)

    def run() -> torch.Tensor:
        for _ in range(3):  # the last keys count
            q = rope(y, None, None, angles, made.pool, rows)
            out = attend(q, made.pool, b, 0)
        return out

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in range(20):
        y.copy_(torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        got = out.clone()
        q = rope(y, None, None, angles, made.pool, rows)
        torch.cuda.synchronize()
        assert torch.equal(got, attend(q, made.pool, b, 0)), seed


def test_many_sequences_have_the_bits_that_each_has_alone() -> None:
    """Of few heads, four blocks of a multiprocessor have them, alone three."""
    case = Case(32, 16, 256, torch.bfloat16, [(i * 37, 1) for i in range(37)], 16, 600)
    made = make(case, GPU)
    attend = attend_cuda.bind(spec_of(case, GPU))
    assert isinstance(attend, attend_cuda.AttendLaunch)
    out = attend(made.q, made.pool, made.plain, 600)
    for i in (0, 5, 36):
        q, batch = only(made, i)
        assert torch.equal(out[i : i + 1], attend(q, made.pool, batch, 600)), i


def test_pools_beyond_two_gigarows_of_bytes_are_addressed() -> None:
    case = Case(8, 4, 256, torch.float16, [(100, 3)], 16, spare=200_000)  # 6.5 GB each of K and V
    made = make(case, GPU, seed=3)
    want = attend_ref.bind(spec_of(case, GPU))(made.q.double(), made.pool, made.plain, 0)
    assert (
        worst(attend_cuda.bind(spec_of(case, GPU))(made.q, made.pool, made.batch, 0), want)
        < TOLERANCE[case.dtype]
    )


def test_a_page_out_of_the_pool_is_reported_and_harms_no_other_sequence() -> None:
    case = CASES["ragged"]
    made = make(case, GPU)
    attend = attend_cuda.bind(spec_of(case, GPU))
    out = attend(made.q, made.pool, made.batch, 0)
    table = made.batch.page_table.clone()
    table[4, 3] = 1 << 33
    bad = attend(made.q, made.pool, replace(made.batch, page_table=table), 0)
    fault = faults.record(GPU)
    assert fault.tolist()[:3] == [1, attend_cuda.OP_ID, 4]
    fault.zero_()
    first = made.plain.starts[4]
    assert torch.equal(bad[:first], out[:first])


def test_rows_without_keys_come_out_as_zeros() -> None:
    case = CASES["group 16"]
    made = make(case, GPU)
    hi = made.batch.hi.clone()
    hi[2] = 0
    out = attend_cuda.bind(spec_of(case, GPU))(made.q, made.pool, replace(made.batch, hi=hi), 0)
    assert not out[2].any() and bool(torch.isfinite(out).all())


def test_lower_bounds_hold_row_by_row() -> None:
    case = CASES["drafter block"]
    made = make(case, GPU)
    for plane in made.pool.planes:
        plane[plane.isnan()] = 0  # behind the case's own windows
    lo = torch.arange(made.plain.n_row, device=GPU) * 37 % 90
    b, plain = replace(made.batch, lo=torch.cat([lo, lo[:16]])), replace(made.plain, lo=lo)
    want = attend_ref.bind(spec_of(case, GPU))(made.q[:48].double(), made.pool, plain, 0)
    assert (
        attend_cases.worst(attend_cuda.bind(spec_of(case, GPU))(made.q, made.pool, b, 0)[:48], want)
        < 2e-3
    )
