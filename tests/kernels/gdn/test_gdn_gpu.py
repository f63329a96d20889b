"""gdn's CUDA kernels against the reference in float64, and against themselves to the bit."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.ops.gdn import cuda as gdn_cuda
from pyspec.cuda.ops.gdn import ref as gdn_ref
from pyspec.cuda.ops.gdn.ref import GdnSpec
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.rows.cuda import GatedRowBuffer, Rows, RowsLaunch
from pyspec.cuda.ops.rows.ref import HeadNorm
from pyspec.slots.batch import Batch, Seq, SeqMode, lay_out
from pyspec.slots.recurrent import StateLayer
from pyspec.slots.table import SlotTable

CPU, GPU = torch.device("cpu"), torch.device("cuda")
WIDTH, N_SLOT, EPS = 6, 4, 1e-6


def shape_of(n_k: int, n_v: int) -> GdnShape:
    return GdnShape(n_k, n_v, 128, 4, 128 * (2 * n_k + n_v))


def seq(slot: int, n: int, keep: bool = False, fold: int = 0) -> Seq:
    return Seq(slot, 0, [0] * n, SeqMode.KEEP if keep else SeqMode.VERIFY, 0, fold)


def laid(seqs: list[Seq], device: torch.device) -> Batch:
    """Only the metadata that gdn reads: positions and pages start anew in every forward."""
    return lay_out(SlotTable(N_SLOT, 64, 64), seqs, device)


def inputs(n: int, shape: GdnShape, gen: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """m and the raw gates."""
    sizes = shape.n_channel, shape.n_v_head, shape.n_v_head
    m, alpha, beta = (torch.randn(n, size, generator=gen) for size in sizes)
    return m, 3 * alpha, 3 * beta


def weights(shape: GdnShape, gen: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """a, dt_bias, conv_w; some heads keep all they saw, some forget at once."""
    scale = torch.tensor([0.0, 0.1, 1.0, 30.0])[torch.arange(shape.n_v_head) % 4]
    a = -scale * torch.rand(shape.n_v_head, generator=gen)
    return a, torch.randn(shape.n_v_head, generator=gen), torch.randn(shape.n_channel, 4, generator=gen)


def wide(*parts: Tensor) -> list[Tensor]:
    """To the GPU as slices of wider rows, as the fused projection gives them."""
    sizes = [x.shape[1] for x in parts]
    sizes.append(64 + -sum(sizes) % 4)
    out = torch.full((parts[0].shape[0], sum(sizes)), float("nan"), device=GPU).split(sizes, 1)
    return [y.copy_(x) for x, y in zip(parts, out[:-1], strict=True)]


def doubled(layer: StateLayer) -> StateLayer:
    for name in ("state", "conv", "k", "v", "g", "beta"):
        setattr(layer, name, getattr(layer, name).double())
    return layer


def error(got: Tensor, want: Tensor) -> float:
    return float((got.cpu().double() - want).norm() / want.norm().clamp_min(1e-30))


def poisoned_blocks() -> None:
    """The allocator's next tensors hold NaN."""
    torch.full((1 << 22,), float("nan"), device=GPU)


ROUNDS = [
    [seq(0, 5, True), seq(2, 1), seq(3, 3, True)],
    [seq(0, 6), seq(2, 3, fold=1), seq(3, 1)],
    [seq(2, 1, fold=3), seq(0, 2, fold=1), seq(1, 4, True), seq(3, 6, fold=1)],
    [seq(3, 1, True, fold=6), seq(0, 2, True, fold=2), seq(2, 6, fold=0), seq(1, 1)],
    [seq(1, 200, True, fold=1), seq(2, 70, True, fold=6), seq(0, 6)],
    [seq(0, 9, True, fold=6), seq(1, 1, True), seq(2, 6), seq(3, 2, True)],
]


@pytest.mark.parametrize("columns", gdn_cuda.COLUMNS)
@pytest.mark.parametrize("heads", [(1, 1), (2, 6), (3, 3), (16, 48)])
def test_ragged_rounds_follow_the_reference(heads: tuple[int, int], columns: int) -> None:
    shape, gen = shape_of(*heads), torch.Generator().manual_seed(1)
    w = weights(shape, gen)
    mine, theirs = StateLayer(shape, N_SLOT, WIDTH, GPU), doubled(StateLayer(shape, N_SLOT, WIDTH, CPU))
    for t in (mine.k, mine.v, mine.g, mine.beta, mine.conv[:, 3:]):
        t.fill_(float("nan"))  # unwritten records
    run, reference = (
        gdn_cuda.bind(GdnSpec(GPU, shape, EPS), columns=columns),
        gdn_ref.bind(GdnSpec(CPU, shape, EPS)),
    )
    for seqs in ROUNDS:
        rows = inputs(sum(s.width for s in seqs), shape, gen)
        poisoned_blocks()
        got = run(*wide(*rows), *(x.to(GPU) for x in w), mine, laid(seqs, GPU))
        want = reference(*(x.double() for x in (*rows, *w)), theirs, laid(seqs, CPU))
        assert error(got, want) < (1e-3 if max(s.width for s in seqs) >= gdn_cuda.CHUNKED else 1e-5)
        assert error(mine.state, theirs.state) < 3e-5
        for s in seqs:
            n = 3 if s.keep else 3 + s.width
            assert error(mine.conv[s.slot, :n], theirs.conv[s.slot, :n]) < 1e-6
            if not s.keep:
                for a, b in zip(mine.tensors()[2:], theirs.tensors()[2:], strict=True):
                    assert error(a[s.slot, : s.width], b[s.slot, : s.width]) < 1e-5


PROMPTS = [
    [seq(0, 64, True), seq(2, 3), seq(3, 63, True)],
    [seq(2, 65, True, fold=2), seq(0, 300, True), seq(1, 6), seq(3, 2, True)],
    [seq(1, 129, True, fold=6), seq(3, 128, True), seq(0, 191, True), seq(2, 64, True)],
]


@pytest.mark.parametrize("heads", [(1, 1), (1, 5), (2, 6), (16, 48)])
def test_chunked_prompts_follow_the_reference(heads: tuple[int, int]) -> None:
    shape, gen = shape_of(*heads), torch.Generator().manual_seed(6)
    w = weights(shape, gen)
    mine, theirs = StateLayer(shape, N_SLOT, WIDTH, GPU), doubled(StateLayer(shape, N_SLOT, WIDTH, CPU))
    for t in (mine.k, mine.v, mine.g, mine.beta, mine.conv[:, 3:]):
        t.fill_(float("nan"))
    run, reference = (
        gdn_cuda.bind(GdnSpec(GPU, shape, EPS), chunked=64),
        gdn_ref.bind(GdnSpec(CPU, shape, EPS)),
    )
    for seqs in PROMPTS:
        rows = inputs(sum(s.width for s in seqs), shape, gen)
        poisoned_blocks()
        got = run(*wide(*rows), *(x.to(GPU) for x in w), mine, laid(seqs, GPU))
        want = reference(*(x.double() for x in (*rows, *w)), theirs, laid(seqs, CPU))
        assert error(got, want) < 1e-3
        for s in seqs:
            assert error(mine.state[s.slot], theirs.state[s.slot]) < 3e-5
            assert error(mine.conv[s.slot, :3], theirs.conv[s.slot, :3]) < 1e-6
    assert faults.record(mine.state.device).tolist() == [0] * 5


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("heads", [(2, 6), (16, 48)])
def test_the_kernels_pass_the_check_they_are_chosen_by(heads: tuple[int, int], grouped: bool) -> None:
    spec = GdnSpec(GPU, dataclasses.replace(shape_of(*heads), grouped=grouped), EPS)
    assert gdn_cuda.check(gdn_cuda.bind(spec), gdn_ref.bind(spec), spec) is None


def hostile(
    kind: str, n: int, shape: GdnShape, gen: torch.Generator
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Rows and weights that make chunked sums hard."""
    (m, alpha, beta), (a, dt_bias, conv_w) = inputs(n, shape, gen), weights(shape, gen)
    kd = shape.n_k_head * shape.dim
    if kind == "equal keys, nothing forgotten":
        m[:, kd : 2 * kd] = m[:1, kd : 2 * kd] + 0.01 * m[:, kd : 2 * kd]
        a, beta = torch.zeros_like(a), beta + 30
    if kind == "forgets at once now and then":
        a, alpha = (
            torch.full_like(a, -1e4),
            torch.where(torch.rand(alpha.shape, generator=gen) < 0.2, alpha, -30.0),
        )
    if kind == "values of all sizes":
        m[:, 2 * kd :] *= torch.logspace(-8, 6, shape.n_channel - 2 * kd)
    if kind == "loud":
        m = 300 * m
    return (m, alpha, beta), (a, dt_bias, conv_w)


@pytest.mark.parametrize(
    "kind",
    ["equal keys, nothing forgotten", "forgets at once now and then", "values of all sizes", "loud"],
)
def test_chunked_prompts_follow_the_reference_on_hostile_rows(kind: str) -> None:
    shape, gen = shape_of(2, 6), torch.Generator().manual_seed(7)
    rows, w = hostile(kind, 700, shape, gen)
    mine, theirs = StateLayer(shape, N_SLOT, WIDTH, GPU), doubled(StateLayer(shape, N_SLOT, WIDTH, CPU))
    run, reference = (
        gdn_cuda.bind(GdnSpec(GPU, shape, EPS), chunked=64),
        gdn_ref.bind(GdnSpec(CPU, shape, EPS)),
    )
    seqs = [seq(1, 580, True), seq(3, 120, True)]
    got = run(*wide(*rows), *(x.to(GPU) for x in w), mine, laid(seqs, GPU))
    want = reference(*(x.double() for x in (*rows, *w)), theirs, laid(seqs, CPU))
    assert error(got, want) < 3e-3
    for h in range(shape.n_v_head):
        assert error(mine.state[1, h], theirs.state[1, h]) < 2e-4
        assert error(mine.state[3, h], theirs.state[3, h]) < 2e-4


def test_a_chunked_prompt_does_not_depend_on_its_neighbours_to_the_bit() -> None:
    shape, gen = shape_of(2, 6), torch.Generator().manual_seed(8)
    w, rows = [x.to(GPU) for x in weights(shape, gen)], [x.to(GPU) for x in inputs(500, shape, gen)]
    run, found = gdn_cuda.bind(GdnSpec(GPU, shape, EPS), chunked=64), []
    for before, after in (
        ([], []),
        ([seq(0, 100, True), seq(3, 4)], [seq(2, 64, True)]),
        ([seq(3, 6)], [seq(0, 2, True)]),
    ):
        layer, first = StateLayer(shape, N_SLOT, WIDTH, GPU), sum(s.width for s in before)
        for t in layer.tensors():
            t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(9)))
        seqs = [*before, seq(1, 150, True, fold=3), *after]
        own = [torch.cat([x[200 : 200 + first], x[:150], x[400:]]) for x in rows]
        got = run(*(x[: sum(s.width for s in seqs)] for x in own), *w, layer, laid(seqs, GPU))
        found.append((got[first : first + 150], layer.state[1], layer.conv[1, :3]))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


def test_a_long_sequence_with_a_bad_slot_is_skipped_and_the_others_run() -> None:
    shape, gen = shape_of(2, 4), torch.Generator().manual_seed(10)
    w, rows = [x.to(GPU) for x in weights(shape, gen)], [x.to(GPU) for x in inputs(270, shape, gen)]
    run, fault = gdn_cuda.bind(GdnSpec(GPU, shape, EPS), chunked=64), faults.record(rows[0].device)
    good, bad = (StateLayer(shape, N_SLOT, WIDTH, GPU) for _ in "ab")
    seqs = [seq(0, 100, True), seq(1, 70, True), seq(2, 100, True)]
    want = run(*rows, *w, good, laid(seqs, GPU))
    batch = laid(seqs, GPU)
    batch.seq_slot[1] = 10**6
    try:
        got = run(*rows, *w, bad, batch)
        assert fault.tolist() == [1, 3, 10**6, 10**6, N_SLOT]
    finally:
        fault.zero_()
    for part in (slice(0, 100), slice(170, 270)):
        assert torch.equal(got[part], want[part])
    for a, b in zip(bad.tensors(), good.tensors(), strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]]) and not a[[1, 3]].any()


def spread(widths: list[int], accepts: list[int]) -> list[tuple[int, int]]:
    """(rows verified, rows accepted) of each round."""
    return list(zip(widths, accepts, strict=True))


WAYS = {
    "one chunk": None,
    "token by token": spread([1] * 30, [1] * 30),
    "all accepted": spread([6] * 5, [6] * 5),
    "one accepted": spread([6] * 30, [1] * 30),
    "ragged": spread([6, 2, 5, 1, 6, 4, 6, 3, 6, 6], [3, 1, 5, 1, 6, 2, 1, 3, 5, 3]),
}


def run_way(way: str, columns: int, neighbours: bool) -> tuple[Tensor, Tensor]:
    """Slot 1's 31 tokens as `way` says; rows that are not accepted hold noise. Returns its state and its outputs."""
    shape, gen = shape_of(2, 6), torch.Generator().manual_seed(2)
    w = [x.to(GPU) for x in weights(shape, gen)]
    text = [x.to(GPU) for x in inputs(31, shape, gen)]
    run, layer = (
        gdn_cuda.bind(GdnSpec(GPU, shape, EPS), columns=columns),
        StateLayer(shape, N_SLOT, WIDTH, GPU),
    )
    outs, done, fold = [], 0, 0
    for width, accepted in [*(WAYS[way] or []), (0, 0)]:
        last = width == 0  # the rest is kept, so that no fold is left
        n, taken = (31 - done, 31 - done) if last else (width, accepted)
        noise = [x.to(GPU) for x in inputs(n, shape, gen)]
        rows = [torch.cat([x[done : done + taken], y[taken:]]) for x, y in zip(text, noise, strict=True)]
        seqs, at = [seq(1, n, last, fold)], 0
        if neighbours:
            seqs, at = [seq(3, 2), *seqs, seq(0, 5, True)], 2
            other = [x.to(GPU) for x in inputs(7, shape, gen)]
            rows = [torch.cat([x[:2], y, x[2:]]) for x, y in zip(other, rows, strict=True)]
        got = run(*rows, *w, layer, laid(seqs, GPU))
        outs.append(got[at : at + taken])
        done, fold = done + taken, taken
    return layer.state[1], torch.cat(outs)


def test_states_and_outputs_do_not_depend_on_how_tokens_came_nor_on_neighbours_to_the_bit() -> None:
    state, out = run_way("one chunk", 2, False)
    assert state.isfinite().all() and state.norm() > 0
    for way, columns, neighbours in itertools.product(WAYS, gdn_cuda.COLUMNS, (False, True)):
        again, rows = run_way(way, columns, neighbours)
        assert torch.equal(again, state) and torch.equal(rows, out), (way, columns, neighbours)


def padded(batch: Batch, seqs: int) -> Batch:
    """`seqs` more sequences without rows and with nonsense for metadata."""

    def more(x: Tensor, value: int) -> Tensor:
        return torch.cat([x, x.new_full((seqs,), value)])

    return dataclasses.replace(
        batch,
        seq_slot=more(batch.seq_slot, 10**9),
        seq_start=more(batch.seq_start, int(batch.seq_start[-1])),
        seq_fold=more(batch.seq_fold, -7),
        seq_keep=more(batch.seq_keep, 1),
    )


def test_padding_and_idle_slots_are_not_touched() -> None:
    shape, gen = shape_of(2, 4), torch.Generator().manual_seed(3)
    w = [x.to(GPU) for x in weights(shape, gen)]
    run, layer = gdn_cuda.bind(GdnSpec(GPU, shape, EPS)), StateLayer(shape, N_SLOT, WIDTH, GPU)
    for t in layer.tensors():
        t[0], t[3] = float("nan"), float("nan")
    rows = [x.to(GPU) for x in inputs(9, shape, gen)]
    seqs = [seq(1, 4), seq(2, 2, True)]
    got = run(*rows, *w, layer, padded(laid(seqs, GPU), 2))  # three rows have no sequence
    assert got[:6].isfinite().all() and not got[6:].any()
    for t in layer.tensors():
        assert t[0].isnan().all() and t[3].isnan().all()
    assert layer.k[1, :4].isfinite().all() and not layer.k[1, 4:].any() and not layer.k[2].any()
    assert faults.record(rows[0].device).tolist() == [0] * 5


@pytest.mark.parametrize(
    ("field", "value", "index", "limit"),
    [
        ("seq_slot", N_SLOT, N_SLOT, N_SLOT),
        ("seq_slot", -1, -1, N_SLOT),
        ("seq_fold", 7, 7, 7),
        ("seq_fold", -1, -1, 7),
    ],
)
def test_a_bad_index_is_reported_and_its_sequence_skipped(
    field: str, value: int, index: int, limit: int
) -> None:
    shape, gen = shape_of(2, 4), torch.Generator().manual_seed(4)
    w = [x.to(GPU) for x in weights(shape, gen)]
    rows = [x.to(GPU) for x in inputs(6, shape, gen)]
    run, fault = gdn_cuda.bind(GdnSpec(GPU, shape, EPS)), faults.record(rows[0].device)
    batch = laid([seq(0, 3, True), seq(1, 3)], GPU)
    good, bad = StateLayer(shape, N_SLOT, WIDTH, GPU), StateLayer(shape, N_SLOT, WIDTH, GPU)
    want = run(*rows, *w, good, batch)
    assert fault.tolist() == [0] * 5
    getattr(batch, field)[1] = value
    try:
        got = run(*rows, *w, bad, batch)
        assert fault.tolist() == [1, 3, value if field == "seq_slot" else 1, index, limit]
    finally:
        fault.zero_()
    assert torch.equal(got[:3], want[:3])
    for a, b in zip(bad.tensors(), good.tensors(), strict=True):
        assert torch.equal(a[0], b[0]) and not a[1:].any()


def test_a_captured_graph_runs_other_sequences_of_the_same_count() -> None:
    shape, gen = shape_of(2, 6), torch.Generator().manual_seed(5)
    w = [x.to(GPU) for x in weights(shape, gen)]
    run, spec_layers = (
        gdn_cuda.bind(GdnSpec(GPU, shape, EPS)),
        [StateLayer(shape, N_SLOT, WIDTH, GPU) for _ in "ab"],
    )
    eager, graphed = spec_layers
    rows = [x.to(GPU) for x in inputs(12, shape, gen)]
    batch = laid([seq(0, 6), seq(1, 6)], GPU)
    run(*rows, *w, StateLayer(shape, N_SLOT, WIDTH, GPU), batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(*rows, *w, graphed, batch)
    for seqs in (
        [seq(2, 4), seq(3, 6)],
        [seq(3, 5, fold=6), seq(2, 2, fold=1)],
        [seq(2, 11, True, fold=2), seq(0, 1)],
    ):
        n, fresh = sum(s.width for s in seqs), laid(seqs, GPU)
        new = [x.to(GPU) for x in inputs(n, shape, gen)]
        want = run(*new, *w, eager, fresh)
        for old, x in zip(rows, new, strict=True):
            old[:n] = x
        for field in ("seq_slot", "seq_start", "seq_fold", "seq_keep"):
            getattr(batch, field).copy_(getattr(fresh, field))
        graph.replay()
        assert torch.equal(got[:n], want)
        assert all(torch.equal(a, b) for a, b in zip(graphed.tensors(), eager.tensors(), strict=True))


PREPARED = [
    *ROUNDS[:4],
    [seq(0, 18, True, fold=1), seq(1, 25, True), seq(2, 3)],
    [seq(s, 1, fold=1) for s in range(4)],
]


def norm_of(shape: GdnShape, n_row: int, gen: torch.Generator) -> HeadNorm:
    """With a gate that is a slice of wider rows."""
    n_in = shape.n_v_head * shape.dim
    weight, gate = (
        1 + 0.3 * torch.randn(shape.dim, generator=gen),
        3 * torch.randn(n_row, n_in + 32, generator=gen),
    )
    return HeadNorm(weight.to(GPU), EPS, gate.to(GPU)[:, 32:], 32.0)


def rows_of(shape: GdnShape) -> RowsLaunch:
    """Rows for a product, buffers full of sevens."""
    rows = RowsLaunch(GPU, shape.n_v_head * shape.dim, (8, 16, 48))
    for t in (rows.blocks, rows.sums, rows.powers):
        t.fill_(7.0)
    return rows


def same(a: Rows, b: Rows) -> bool:
    pairs = zip((a.blocks, a.sums, a.powers), (b.blocks, b.sums, b.powers), strict=True)
    return (a.n_row, a.pad) == (b.n_row, b.pad) and all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("columns", gdn_cuda.COLUMNS)
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (2, 6), (16, 48)])
def test_rows_prepared_on_the_way_have_the_bits_of_outputs_prepared_alone(
    heads: tuple[int, int], columns: int
) -> None:
    shape, gen = shape_of(*heads), torch.Generator().manual_seed(11)
    w = [x.to(GPU) for x in weights(shape, gen)]
    one, two = StateLayer(shape, N_SLOT, WIDTH, GPU), StateLayer(shape, N_SLOT, WIDTH, GPU)
    run, mine, theirs = (
        gdn_cuda.bind(GdnSpec(GPU, shape, EPS), columns=columns),
        rows_of(shape),
        rows_of(shape),
    )
    for seqs in [*PREPARED, *PREPARED[1:]]:
        n = sum(s.width for s in seqs)
        x, prep = wide(*inputs(n, shape, gen)), norm_of(shape, n, gen)
        poisoned_blocks()
        got = run.prepared(*x, *w, one, laid(seqs, GPU), into=GatedRowBuffer(mine, prep))
        want = theirs(run(*x, *w, two, laid(seqs, GPU)).flatten(1), prep)
        assert same(got, want)
        assert all(torch.equal(a, b) for a, b in zip(one.tensors(), two.tensors(), strict=True))
    assert faults.record(mine.blocks.device).tolist() == [0] * 5


def test_a_captured_graph_prepares_rows_of_other_sequences_of_the_same_count() -> None:
    """Rows without a sequence keep their contents. 200 replays: the bits are the same in any order of blocks."""
    shape, gen = shape_of(16, 48), torch.Generator().manual_seed(12)
    w = [x.to(GPU) for x in weights(shape, gen)]
    eager, graphed = StateLayer(shape, N_SLOT, WIDTH, GPU), StateLayer(shape, N_SLOT, WIDTH, GPU)
    run, mine, theirs = gdn_cuda.bind(GdnSpec(GPU, shape, EPS)), rows_of(shape), rows_of(shape)
    x, prep, batch = (
        [t.to(GPU) for t in inputs(12, shape, gen)],
        norm_of(shape, 12, gen),
        laid([seq(0, 6), seq(1, 6)], GPU),
    )
    run.prepared(*x, *w, StateLayer(shape, N_SLOT, WIDTH, GPU), batch, into=GatedRowBuffer(mine, prep))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run.prepared(*x, *w, graphed, batch, into=GatedRowBuffer(mine, prep))
    widths = [(4, 6), (5, 2), (1, 1), (6, 6)]
    for i in range(200):
        seqs = [seq(i % 2, widths[i % 4][0]), seq(2 + i % 2, widths[i % 4][1])]
        n, fresh = sum(s.width for s in seqs), laid(seqs, GPU)
        for old in (*x, prep.gate):
            old[:n] = torch.randn(old[:n].shape, device=GPU)
        part = HeadNorm(prep.weight, EPS, prep.gate[:n], prep.power)
        theirs.blocks.copy_(mine.blocks), theirs.sums.copy_(mine.sums), theirs.powers.copy_(mine.powers)
        o = run(*(t[:n] for t in x), *w, eager, fresh)
        theirs.prepare(o.flatten(1), part, theirs.blocks, theirs.sums, theirs.powers, got.pad)
        for field in ("seq_slot", "seq_start", "seq_fold", "seq_keep"):
            getattr(batch, field).copy_(getattr(fresh, field))
        graph.replay()
        assert same(got, Rows(theirs.blocks, theirs.sums, theirs.powers, 12, got.pad))
        assert all(torch.equal(a, b) for a, b in zip(graphed.tensors(), eager.tensors(), strict=True))
