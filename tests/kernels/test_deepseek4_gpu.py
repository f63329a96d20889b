"""The kernels of DeepSeek-V4's attention on a GPU: their own checks in the model's shapes, captured graphs, long contexts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pyspec.cuda import faults
from pyspec.cuda.ops.attend.cases import TOLERANCE, worst
from pyspec.cuda.ops.compress import cases as compress_cases
from pyspec.cuda.ops.compress import cuda as compress_cuda
from pyspec.cuda.ops.compress import ref as compress_ref
from pyspec.cuda.ops.compress.ref import CompressSpec
from pyspec.cuda.ops.index_rows import cases as index_cases
from pyspec.cuda.ops.index_rows import cuda as index_cuda
from pyspec.cuda.ops.index_rows import ref as index_ref
from pyspec.cuda.ops.index_rows.cases import Ragged
from pyspec.cuda.ops.index_rows.ref import IndexSpec
from pyspec.cuda.ops.rope_tail import cuda as tail_cuda
from pyspec.cuda.ops.rope_tail import ref as tail_ref
from pyspec.cuda.ops.rope_tail.ref import RopeTailSpec
from pyspec.cuda.ops.sparse_attend import cases as sparse_cases
from pyspec.cuda.ops.sparse_attend import cuda as sparse_cuda
from pyspec.cuda.ops.sparse_attend import ref as sparse_ref
from pyspec.cuda.ops.sparse_attend.ref import ROWS, SparseSpec
from pyspec.cuda.ops.streams import cuda as streams_cuda
from pyspec.cuda.ops.streams.ref import StreamsSpec, TorchStreams

GPU = torch.device("cuda", 0)
TYPES = [torch.float16, torch.bfloat16]
WIDE = Ragged([(5000 + 431 * i, 1 + i) for i in range(17)], 32, (7, 2))
INDEX = IndexSpec(GPU, 64, 128, 512, 4, torch.float16, 64)
CSA = SparseSpec(GPU, 64, 512, 128, 4, torch.float16, 64, 1e-6)
HCA, RAW = replace(CSA, ratio=128), replace(CSA, ratio=0)
COMPRESSORS = [
    CompressSpec(GPU, 4, 512, True, 64, 1e-6, torch.float16),
    CompressSpec(GPU, 4, 128, True, 64, 1e-6, torch.float16),
    CompressSpec(GPU, 128, 512, False, 64, 1e-6, torch.float16),
    CompressSpec(GPU, 4, 32, True, 16, 1e-6, torch.float32),
    CompressSpec(GPU, 128, 32, False, 16, 1e-6, torch.bfloat16),
]


@pytest.fixture(autouse=True)
def _nothing_trips() -> None:
    faults.record(GPU).zero_()


@pytest.mark.parametrize("kv", TYPES)
@pytest.mark.parametrize(
    ("n_head", "dim", "top_k"), [(64, 128, 512), (64, 128, 8), (32, 32, 6), (12, 64, 1024)]
)
def test_index_rows_passes_its_check(n_head: int, dim: int, top_k: int, kv: torch.dtype) -> None:
    spec = IndexSpec(GPU, n_head, dim, top_k, 4, kv, dim // 2)
    assert index_cases.check(index_cuda.bind(spec), index_ref.bind(spec), spec) is None
    assert faults.record(GPU).tolist() == [0] * 5


def test_index_rows_of_widths_from_1_to_17_are_the_references_and_the_same_twice() -> None:
    asked, launch = index_cases.make(WIDE, INDEX, whole=True), index_cuda.bind(INDEX)
    got = launch(asked.q, asked.w, asked.freq, asked.pool, asked.placed.batch)
    assert torch.equal(
        got, index_ref.bind(INDEX)(asked.q, asked.w, asked.freq, asked.pool, asked.placed.plain)
    )
    assert torch.equal(got, launch(asked.q, asked.w, asked.freq, asked.pool, asked.placed.batch))
    asked = index_cases.make(WIDE, INDEX)
    got = launch(asked.q, asked.w, asked.freq, asked.pool, asked.placed.batch)
    assert index_cases.fault_of(got, asked, INDEX) is None
    for seq, (_, width) in enumerate(WIDE.seqs):
        rows, one = index_cases.only(asked.placed.plain, seq, width // 2, 1)
        assert torch.equal(launch(asked.q[rows], asked.w[rows], asked.freq, asked.pool, one), got[rows])


@pytest.mark.parametrize("n_past", [65_530, 70_000, 400_000])
def test_index_rows_of_long_contexts_are_the_references(n_past: int) -> None:
    case = Ragged([(n_past, 3), (n_past // 2, 2), (100, 1)], 64, (2, 1))
    asked = index_cases.make(case, INDEX, whole=True)
    got = index_cuda.bind(INDEX)(asked.q, asked.w, asked.freq, asked.pool, asked.placed.batch)
    assert torch.equal(
        got, index_ref.bind(INDEX)(asked.q, asked.w, asked.freq, asked.pool, asked.placed.plain)
    )


def test_index_rows_of_a_prompt_are_the_references() -> None:
    asked = index_cases.make(Ragged([(0, 2500), (4000, 400), (9000, 1)], 32), INDEX, whole=True)
    got = index_cuda.bind(INDEX)(asked.q, asked.w, asked.freq, asked.pool, asked.placed.batch)
    assert torch.equal(
        got, index_ref.bind(INDEX)(asked.q, asked.w, asked.freq, asked.pool, asked.placed.plain)
    )


def test_a_captured_index_serves_batches_of_other_lengths() -> None:
    asked, launch = (
        index_cases.make(Ragged([(9000, 4), (5000, 4)]), INDEX, whole=True),
        index_cuda.bind(INDEX),
    )
    batch = replace(
        asked.placed.batch, positions=asked.placed.batch.positions.clone(), bucket=8, seqs=()
    )
    launch(asked.q, asked.w, asked.freq, asked.pool, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(asked.q, asked.w, asked.freq, asked.pool, batch)
    for shift in (0, -1, -2, -2800, -4990):
        batch.positions.copy_(asked.placed.batch.positions + shift)
        graph.replay()
        plain = replace(asked.placed.plain, positions=batch.positions)
        assert torch.equal(
            out, index_ref.bind(INDEX)(asked.q, asked.w, asked.freq, asked.pool, plain)
        ), shift
    assert faults.record(GPU).tolist() == [0] * 5


def test_index_rows_report_what_is_no_number_and_pages_that_do_not_exist() -> None:
    asked, launch = index_cases.make(WIDE, INDEX, whole=True), index_cuda.bind(INDEX)
    asked.pool.k.nan_to_num_(0.0)
    right = launch(asked.q, asked.w, asked.freq, asked.pool, asked.placed.batch)
    table = asked.placed.batch.page_table.clone()
    table[3, 5] = 1 << 33
    bad = launch(asked.q, asked.w, asked.freq, asked.pool, replace(asked.placed.batch, page_table=table))
    assert faults.record(GPU).tolist()[:3] == [1, index_cuda.OP_ID, 3]
    faults.record(GPU).zero_()
    starts = asked.placed.plain.starts
    assert torch.equal(bad[: starts[3]], right[: starts[3]]) and torch.equal(
        bad[starts[4] :], right[starts[4] :]
    )
    asked.q[starts[2]] = torch.nan
    launch(asked.q, asked.w, asked.freq, asked.pool, asked.placed.batch)
    assert faults.record(GPU).tolist()[:4] == [1, index_cuda.OP_ID, 2, -1]


@pytest.mark.parametrize("kv", TYPES)
@pytest.mark.parametrize(
    "spec",
    [CSA, HCA, RAW, replace(CSA, n_head=128), replace(CSA, n_head=4, dim=32, window=12, n_rot=16)],
)
def test_sparse_attend_passes_its_check(spec: SparseSpec, kv: torch.dtype) -> None:
    spec = replace(spec, kv=kv)
    assert sparse_cases.check(sparse_cuda.bind(spec), sparse_ref.bind(spec), spec) is None
    assert faults.record(GPU).tolist() == [0] * 5


@pytest.mark.parametrize(("spec", "top_k"), [(CSA, 512), (CSA, 8), (HCA, 0), (RAW, 0)])
def test_sparse_attend_of_widths_from_1_to_17_is_the_references(spec: SparseSpec, top_k: int) -> None:
    made = sparse_cases.make(WIDE, spec, top_k)
    assert sparse_cases.difference(made, sparse_cuda.bind(spec), sparse_ref.bind(spec), spec) is None


@pytest.mark.parametrize(("spec", "top_k"), [(CSA, 512), (HCA, 0), (RAW, 0)])
def test_sparse_attend_gives_the_same_bits_however_heads_are_shared_out(
    spec: SparseSpec, top_k: int
) -> None:
    made = sparse_cases.make(Ragged([(9000, 5), (70_000, 3), (40, 1)], 64), spec, top_k)
    builds = sparse_cuda.bind(spec).builds
    outs = [made.run(sparse_cuda.bind(spec, build=build), made.placed.batch)[0] for build in builds * 2]
    assert all(torch.equal(outs[0], other) for other in outs[1:])


def test_sparse_attend_of_a_prompt_is_the_references() -> None:
    for spec, top_k in ((CSA, 512), (HCA, 0), (RAW, 0)):
        made = sparse_cases.make(Ragged([(0, 700), (4000, 300), (9000, 1)], 32), spec, top_k)
        assert sparse_cases.difference(made, sparse_cuda.bind(spec), sparse_ref.bind(spec), spec) is None


@pytest.mark.parametrize(("spec", "top_k"), [(CSA, 512), (HCA, 0), (RAW, 0)])
def test_a_captured_attention_serves_batches_of_other_lengths(spec: SparseSpec, top_k: int) -> None:
    """Every length has its rings and its choice at the same addresses."""
    lengths = [(9000, 5000), (8999, 4990), (300, 70), (2, 0), (9000, 1)]
    made = [
        sparse_cases.make(Ragged([(a, 4), (b, 4)]), spec, top_k, seed)
        for seed, (a, b) in enumerate(lengths)
    ]
    launch, first = sparse_cuda.bind(spec), made[0]
    n_col, n_page = (
        max(m.placed.batch.page_table.shape[1] for m in made),
        max(m.placed.n_page for m in made),
    )
    table = torch.zeros(2, n_col, dtype=torch.int64, device=GPU)
    pool = (
        None
        if first.pool is None
        else index_cases.pool_for(
            replace(first.placed, n_page=n_page), spec.ratio, spec.dim, spec.kv, GPU
        )
    )
    batch = replace(first.placed.batch, page_table=table, bucket=8, seqs=())
    ring, q, kv, chosen = (
        sparse_cases.copied(first.ring),
        first.q.clone(),
        first.kv.clone(),
        first.chosen,
    )
    sinks, tail = first.sinks.clone(), first.tail
    made = [replace(m, tail=tail) for m in made]

    def put(m: sparse_cases.Windowed) -> None:
        own = m.placed.batch
        table.zero_()[:, : own.page_table.shape[1]].copy_(own.page_table)
        for to, by in ((q, m.q), (kv, m.kv), (ring.rows[ROWS], m.ring.rows[ROWS]), (sinks, m.sinks), (batch.positions, own.positions), (batch.seq_slot, own.seq_slot)):  # fmt: skip
            to.copy_(by)
        if chosen is not None and m.chosen is not None:
            chosen.copy_(m.chosen)
        if pool is not None and m.pool is not None:
            pool.k[: len(m.pool.k)].copy_(m.pool.k)

    wants = [m.run(sparse_ref.bind(spec), m.placed.plain)[0] for m in made]
    put(first)
    launch(q, kv, tail, sparse_cases.copied(ring), pool, chosen, sinks, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(q, kv, tail, ring, pool, chosen, sinks, batch)
    for m, want in zip(made, wants, strict=True):
        put(m)
        graph.replay()
        assert worst(out, want) < TOLERANCE[spec.kv], m.placed.plain.max_hi
    assert faults.record(GPU).tolist() == [0] * 5


def test_sparse_attend_reports_rows_and_pages_that_do_not_exist() -> None:
    made, launch = sparse_cases.make(WIDE, CSA, 512), sparse_cuda.bind(CSA)
    for plane in (made.pool.k, made.ring.rows[ROWS]):
        plane.nan_to_num_(0.0)
    right, _ = made.run(launch, made.placed.batch)
    starts = made.placed.plain.starts
    table, chosen = made.placed.batch.page_table.clone(), made.chosen.clone()
    table[3] = 1 << 33
    chosen[starts[5], 7] = 1 << 28
    for batch, rows, seq in (
        (replace(made.placed.batch, page_table=table), made.chosen, 3),
        (made.placed.batch, chosen, 5),
    ):
        bad, _ = replace(made, chosen=rows).run(launch, batch)
        assert faults.record(GPU).tolist()[:3] == [1, sparse_cuda.OP_ID, seq]
        faults.record(GPU).zero_()
        assert torch.equal(bad[: starts[seq]], right[: starts[seq]])
        assert torch.equal(bad[starts[seq + 1] :], right[starts[seq + 1] :])


@pytest.mark.parametrize("spec", COMPRESSORS)
def test_compress_passes_its_check(spec: CompressSpec) -> None:
    assert compress_cases.check(compress_cuda.bind(spec), compress_ref.bind(spec), spec) is None
    assert faults.record(GPU).tolist() == [0] * 5


@pytest.mark.parametrize("slack", [0, 8, 34])
@pytest.mark.parametrize("spec", COMPRESSORS)
def test_compress_of_widths_from_1_to_17_is_the_references(spec: CompressSpec, slack: int) -> None:
    given = compress_cases.make(WIDE, spec, 1, slack)
    assert (
        compress_cases.difference(given, compress_cuda.bind(spec), compress_ref.bind(spec), spec) is None
    )


@pytest.mark.parametrize("spec", COMPRESSORS[:3])
def test_a_captured_compressor_serves_rows_that_are_moved(spec: CompressSpec) -> None:
    lengths = [(300, 126), (301, 127), (302, 130), (303, 0), (299, 383)]
    made = [
        compress_cases.make(Ragged([(a, 4), (b, 2)]), spec, seed) for seed, (a, b) in enumerate(lengths)
    ]
    launch, first = compress_cuda.bind(spec), made[0]
    made = [replace(m, places=first.places) for m in made]
    batch = replace(first.placed.batch, bucket=6, seqs=())
    n_page = max(m.placed.n_page for m in made)
    pool = index_cases.pool_for(replace(first.placed, n_page=n_page), spec.ratio, spec.dim, spec.kv, GPU)
    values, scores, norm, (ring, _) = (
        first.values.clone(),
        first.scores.clone(),
        first.norm.clone(),
        first.copies(),
    )

    def put(m: compress_cases.Given) -> None:
        own = m.placed.batch
        names = ("positions", "kv_rows", "seq_slot")
        pairs = [(getattr(batch, name), getattr(own, name)) for name in names]
        pairs += [(ring.rows[name], m.ring.rows[name]) for name in compress_cases.NAMES]
        for to, by in (*pairs, (values, m.values), (scores, m.scores), (norm, m.norm)):
            to.copy_(by)
        pool.k.fill_(torch.nan)

    wants = [m.run(compress_ref.bind(spec), (slice(None), m.placed.plain)) for m in made]
    put(first)
    launch(values, scores, first.places, norm, first.freq, first.copies()[0], pool, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(values, scores, first.places, norm, first.freq, ring, pool, batch)
    for m, (kept, want) in zip(made, wants, strict=True):
        put(m)
        graph.replay()
        own = pool.k[: len(want.k)]
        assert torch.equal(own.isnan(), want.k.isnan())
        assert bool((own.nan_to_num(0.0).float() - want.k.nan_to_num(0.0).float()).abs().amax() < 0.02)
        for name in compress_cases.NAMES:
            assert torch.equal(ring.rows[name].view(torch.int32), kept.rows[name].view(torch.int32))
    assert faults.record(GPU).tolist() == [0] * 5


@pytest.mark.parametrize("slack", [0, 8, 34])
def test_two_compressors_in_one_launch_leave_what_they_leave_one_after_the_other(slack: int) -> None:
    specs = COMPRESSORS[:2]
    launches = [compress_cuda.bind(spec) for spec in specs]
    made = [compress_cases.make(WIDE, spec, 2, slack) for spec in specs]
    batch, freq = made[0].placed.batch, made[0].freq
    wide = torch.randn(len(made[0].values), 2 * sum(launch.width for launch in launches), device=GPU)
    products = [p.chunk(2, -1) for p in wide.split([2 * launch.width for launch in launches], -1)]
    wants, given = [], []
    for launch, of, (values, scores) in zip(launches, made, products, strict=True):
        wants.append(of.copies())
        launch(values, scores, of.places, of.norm, freq, *wants[-1], batch)
        given.append((values, scores, of.places, of.norm, *of.copies()))
    both = launches[0].with_beside(launches[1])
    assert both is not None
    both(*given, freq, batch)
    for (*_, ring, pool), (kept, want) in zip(given, wants, strict=True):
        assert torch.equal(pool.k.view(torch.int16), want.k.view(torch.int16))
        assert all(
            torch.equal(ring.rows[x].view(torch.int32), kept.rows[x].view(torch.int32))
            for x in ring.rows
        )
    assert faults.record(GPU).tolist() == [0] * 5


@pytest.mark.parametrize("n", [4096, 7168, 64])
def test_streams_pass_their_check(n: int) -> None:
    """Among it: rows that are normed on the way are those of rows.cu, to the bit."""
    spec = StreamsSpec(GPU, 4, n, 20, 1e-6, 1e-6)
    assert streams_cuda.check(streams_cuda.bind(spec), TorchStreams(spec), spec) is None


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("dim", "n_rot"), [(512, 64), (128, 64), (32, 16)])
def test_rope_tail_passes_its_check(dim: int, n_rot: int, normed: bool) -> None:
    spec = RopeTailSpec(GPU, dim, n_rot, normed, 1e-6)
    assert tail_cuda.check(tail_cuda.bind(spec), tail_ref.bind(spec), spec) is None
