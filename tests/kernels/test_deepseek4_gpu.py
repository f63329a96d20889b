"""The kernels of DeepSeek-V4's attention on a GPU: their own checks in the model's shapes, captured graphs, long contexts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pyspec.cuda import faults
from pyspec.cuda.ops.index_rows import cases as index_cases
from pyspec.cuda.ops.index_rows import cuda as index_cuda
from pyspec.cuda.ops.index_rows import ref as index_ref
from pyspec.cuda.ops.index_rows.cases import Ragged
from pyspec.cuda.ops.index_rows.ref import IndexSpec

GPU = torch.device("cuda", 0)
TYPES = [torch.float16, torch.bfloat16]
WIDE = Ragged([(5000 + 431 * i, 1 + i) for i in range(17)], 32, (7, 2))
INDEX = IndexSpec(GPU, 64, 128, 512, 4, torch.float16)


@pytest.fixture(autouse=True)
def _nothing_trips() -> None:
    faults.record(GPU).zero_()


@pytest.mark.parametrize("kv", TYPES)
@pytest.mark.parametrize(("n_head", "dim", "top_k"), [(64, 128, 512), (64, 128, 8), (32, 32, 6), (12, 64, 1024)])
def test_index_rows_passes_its_check(n_head: int, dim: int, top_k: int, kv: torch.dtype) -> None:
    spec = IndexSpec(GPU, n_head, dim, top_k, 4, kv)
    assert index_cases.check(index_cuda.bind(spec), index_ref.bind(spec), spec) is None
    assert faults.record(GPU).tolist() == [0] * 5


def test_index_rows_of_widths_from_1_to_17_are_the_references_and_the_same_twice() -> None:
    asked, launch = index_cases.make(WIDE, INDEX, whole=True), index_cuda.bind(INDEX)
    got = launch(asked.q, asked.w, asked.pool, asked.placed.batch)
    assert torch.equal(got, index_ref.bind(INDEX)(asked.q, asked.w, asked.pool, asked.placed.plain))
    assert torch.equal(got, launch(asked.q, asked.w, asked.pool, asked.placed.batch))
    asked = index_cases.make(WIDE, INDEX)
    got = launch(asked.q, asked.w, asked.pool, asked.placed.batch)
    assert index_cases.fault_of(got, asked, INDEX) is None
    for seq, (_, width) in enumerate(WIDE.seqs):
        rows, one = index_cases.only(asked.placed.plain, seq, width // 2, 1)
        assert torch.equal(launch(asked.q[rows], asked.w[rows], asked.pool, one), got[rows])


@pytest.mark.parametrize("n_past", [65_530, 70_000, 400_000])
def test_index_rows_of_long_contexts_are_the_references(n_past: int) -> None:
    case = Ragged([(n_past, 3), (n_past // 2, 2), (100, 1)], 64, (2, 1))
    asked = index_cases.make(case, INDEX, whole=True)
    got = index_cuda.bind(INDEX)(asked.q, asked.w, asked.pool, asked.placed.batch)
    assert torch.equal(got, index_ref.bind(INDEX)(asked.q, asked.w, asked.pool, asked.placed.plain))


def test_index_rows_of_a_prompt_are_the_references() -> None:
    asked = index_cases.make(Ragged([(0, 2500), (4000, 400), (9000, 1)], 32), INDEX, whole=True)
    got = index_cuda.bind(INDEX)(asked.q, asked.w, asked.pool, asked.placed.batch)
    assert torch.equal(got, index_ref.bind(INDEX)(asked.q, asked.w, asked.pool, asked.placed.plain))


def test_a_captured_index_serves_batches_of_other_lengths() -> None:
    asked, launch = index_cases.make(Ragged([(9000, 4), (5000, 4)]), INDEX, whole=True), index_cuda.bind(INDEX)
    batch = replace(asked.placed.batch, positions=asked.placed.batch.positions.clone(), bucket=8, seqs=())
    launch(asked.q, asked.w, asked.pool, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(asked.q, asked.w, asked.pool, batch)
    for shift in (0, -1, -2, -2800, -4990):
        batch.positions.copy_(asked.placed.batch.positions + shift)
        graph.replay()
        plain = replace(asked.placed.plain, positions=batch.positions)
        assert torch.equal(out, index_ref.bind(INDEX)(asked.q, asked.w, asked.pool, plain)), shift
    assert faults.record(GPU).tolist() == [0] * 5


def test_index_rows_report_what_is_no_number_and_pages_that_do_not_exist() -> None:
    asked, launch = index_cases.make(WIDE, INDEX, whole=True), index_cuda.bind(INDEX)
    asked.pool.k.nan_to_num_(0.0)
    right = launch(asked.q, asked.w, asked.pool, asked.placed.batch)
    table = asked.placed.batch.page_table.clone()
    table[3, 5] = 1 << 33
    bad = launch(asked.q, asked.w, asked.pool, replace(asked.placed.batch, page_table=table))
    assert faults.record(GPU).tolist()[:3] == [1, index_cuda.OP_ID, 3]
    faults.record(GPU).zero_()
    starts = asked.placed.plain.starts
    assert torch.equal(bad[: starts[3]], right[: starts[3]]) and torch.equal(bad[starts[4] :], right[starts[4] :])
    asked.q[starts[2]] = torch.nan
    launch(asked.q, asked.w, asked.pool, asked.placed.batch)
    assert faults.record(GPU).tolist()[:4] == [1, index_cuda.OP_ID, 2, -1]
