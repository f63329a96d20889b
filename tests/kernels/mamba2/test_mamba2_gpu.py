"""mamba2's CUDA kernels on a GPU: the op's own check in the real models' shapes, and themselves to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.ops.mamba2 import cuda as mamba2_cuda
from pyspec.cuda.ops.mamba2 import ref as mamba2_ref
from pyspec.cuda.ops.mamba2.op import mamba2
from pyspec.cuda.ops.mamba2.ref import Mamba2Spec, Params, make_params
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Seq, SeqMode, lay_out
from pyspec.slots.recurrent import StateLayer
from pyspec.slots.table import SlotTable

GPU = torch.device("cuda")
SUPER, NANO, PUZZLE = (Mamba2Shape(h, 64, 8, n, 4) for h, n in ((128, 128), (64, 128), (128, 96)))
SMALL = Mamba2Shape(8, 64, 2, 128, 4)
WAYS = {
    "one prompt": [(40, True)],
    "one by one": [(1, True)] * 40,
    "verifies": [(6, False)] * 6 + [(4, True)],
    "mixed": [(9, True), (1, False), (5, False), (1, True), (6, False), (18, True)],
}


def params(shape: Mamba2Shape) -> Params:
    return make_params(shape, torch.Generator().manual_seed(1), GPU)


def rows_of(n: int, shape: Mamba2Shape, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Slices of wider rows, as the projection gives them."""
    wide = torch.randn(
        n, shape.n_channel + shape.n_head, generator=torch.Generator().manual_seed(seed)
    ).to(GPU)
    m, dt = wide.split([shape.n_channel, shape.n_head], 1)
    return m, dt


@pytest.mark.parametrize("columns", mamba2_cuda.COLUMNS)
@pytest.mark.parametrize("shape", [SUPER, NANO, PUZZLE, SMALL, Mamba2Shape(8, 128, 4, 64, 4)])
def test_mamba2_passes_the_ops_check(shape: Mamba2Shape, columns: int) -> None:
    spec = Mamba2Spec(GPU, shape)
    assert mamba2_ref.check(mamba2_cuda.bind(spec, columns=columns), mamba2_ref.bind(spec), spec) is None
    assert not faults.record(GPU).any()


@pytest.mark.parametrize("shape", [SUPER, NANO])
def test_mamba2_kernels_are_what_models_run_with(shape: Mamba2Shape) -> None:
    assert mamba2.chosen(Mamba2Spec(GPU, shape)).name == "cuda"


def run_way(way: str, columns: int, neighbours: bool) -> tuple[Tensor, Tensor]:
    """Slot 1's 40 tokens as `way` says. Returns its state and its outputs."""
    run, layer = mamba2_cuda.bind(Mamba2Spec(GPU, SMALL), columns=columns), StateLayer(SMALL, 3, 6, GPU)
    (m, dt), (more_m, more_dt), p = rows_of(40, SMALL), rows_of(7, SMALL, 5), params(SMALL)
    outs, at, fold = [], 0, 0
    for n, keep in WAYS[way]:
        seqs, first, part = (
            [Seq(1, 0, [0] * n, SeqMode.KEEP if keep else SeqMode.VERIFY, 0, fold)],
            0,
            slice(at, at + n),
        )
        rows = m[part], dt[part]
        if neighbours:
            seqs, first = [Seq(2, 0, [0] * 2), *seqs, Seq(0, 0, [0] * 5, SeqMode.KEEP)], 2
            rows = tuple(
                torch.cat([x[:2], y, x[2:]]) for x, y in zip((more_m, more_dt), rows, strict=True)
            )
        outs.append(run(*rows, p, layer, lay_out(SlotTable(3, 64, 64), seqs, GPU))[first : first + n])
        at, fold = at + n, 0 if keep else n
    return layer.state[1], torch.cat(outs)


def test_states_and_outputs_do_not_depend_on_how_tokens_came_nor_on_neighbours_to_the_bit() -> None:
    state, out = run_way("one prompt", 2, False)
    assert state.isfinite().all() and state.norm() > 0
    for way in WAYS:
        for columns in mamba2_cuda.COLUMNS:
            for neighbours in (False, True):
                again, rows = run_way(way, columns, neighbours)
                assert torch.equal(again, state) and torch.equal(rows, out), (way, columns, neighbours)


def test_a_thousand_rounds_without_waiting_give_what_waiting_rounds_give() -> None:
    """Errors of kernels that overlap show only without a wait in between."""
    results = []
    for waits in (True, False):
        run, layer = mamba2_cuda.bind(Mamba2Spec(GPU, NANO)), StateLayer(NANO, 2, 4, GPU)
        (m, dt), p, table = rows_of(8, NANO), params(NANO), SlotTable(2, 64, 64)
        batches = [
            lay_out(
                table,
                [
                    Seq(0, 0, [0] * 4, SeqMode.VERIFY, 0, fold),
                    Seq(1, 0, [0] * 4, SeqMode.VERIFY, 0, 3 - fold),
                ],
                GPU,
            )
            for fold in range(4)
        ]
        out = torch.zeros(8, NANO.n_head, NANO.head_dim, device=GPU)
        for i in range(1000):
            out += run(m, dt, p, layer, batches[i % 4])
            if waits:
                torch.cuda.synchronize()
        results.append((out, layer.state))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_graph_serves_other_slots_and_widths() -> None:
    p, run, spec = params(SMALL), mamba2_cuda.bind(Mamba2Spec(GPU, SMALL)), Mamba2Spec(GPU, SMALL)
    layers, reference = [StateLayer(SMALL, 4, 6, GPU) for _ in range(2)], mamba2_ref.bind(spec)
    arena, (m, dt) = Arena(4, 8, GPU), rows_of(8, SMALL)
    graph, out = torch.cuda.CUDAGraph(), torch.empty(0)
    for i, seqs in enumerate((
        [Seq(0, 0, [0] * 8, SeqMode.KEEP)],
        [Seq(3, 0, [0] * 5), Seq(1, 0, [0] * 3, SeqMode.KEEP)],
        [Seq(1, 0, [0] * 2), Seq(0, 0, [0]), Seq(3, 0, [0] * 4, SeqMode.VERIFY, 0, 4)],
    )):  # fmt: skip
        batch = lay_out(SlotTable(4, 64, 64), seqs, GPU, arena=arena)
        if i == 0:
            run(m, dt, p, StateLayer(SMALL, 4, 6, GPU), batch)
            with torch.cuda.graph(graph):
                out = run(m, dt, p, layers[0], batch)
        graph.replay()
        n = sum(s.width for s in seqs)
        want = reference(m[:n], dt[:n], p, layers[1], lay_out(SlotTable(4, 64, 64), seqs, GPU))
        assert torch.allclose(out[:n], want, rtol=1e-4, atol=1e-3) and not out[n:].any()
    assert torch.allclose(layers[0].state, layers[1].state, rtol=1e-4, atol=1e-4)


def doubled(p: Params) -> Params:
    return Params(*(getattr(p, name).double().cpu() for name in Params.__slots__))


def error(got: Tensor, want: Tensor) -> float:
    return float((got.cpu().double() - want).norm() / want.norm().clamp_min(1e-30))


def hostile(kind: str, m: Tensor, dt: Tensor, p: Params) -> tuple[Tensor, Tensor, Params]:
    """Rows and parameters that make chunked sums hard."""
    gen = torch.Generator().manual_seed(7)
    if kind == "nothing forgotten":
        return m, dt, replace(p, a=torch.full_like(p.a, -1e-7))
    if kind == "steps next to nothing":
        return m, dt - 30, p
    if kind == "forgets all now and then":
        now = (torch.rand(dt.shape, generator=gen) < 0.1).to(GPU)
        return m, torch.where(now, 50.0, -12.0), replace(p, a=torch.full_like(p.a, -300.0))
    if kind == "rows from 1e-6 to 1e6":
        return (
            m * torch.logspace(-6, 6, len(m))[torch.randperm(len(m), generator=gen), None].to(GPU),
            dt,
            p,
        )
    return m * 3000 if kind == "loud" else m, dt, p


PROMPTS = [
    [Seq(0, 0, [0] * 129, SeqMode.KEEP), Seq(2, 0, [0] * 5), Seq(1, 0, [0] * 128, SeqMode.KEEP)],
    [Seq(2, 0, [0] * 300, SeqMode.KEEP, 0, 4), Seq(1, 0, [0] * 3), Seq(0, 0, [0] * 191, SeqMode.KEEP)],
    [Seq(1, 0, [0] * 577, SeqMode.KEEP, 0, 2)],
]


PROMPT_SHAPES = [NANO, PUZZLE, SMALL, Mamba2Shape(8, 32, 4, 32, 4), Mamba2Shape(8, 128, 4, 64, 4)]
HOSTILE = [
    "nothing forgotten",
    "steps next to nothing",
    "forgets all now and then",
    "rows from 1e-6 to 1e6",
    "loud",
]


@pytest.mark.parametrize(
    ("shape", "kind"),
    [*((shape, "ordinary") for shape in PROMPT_SHAPES), *((SMALL, kind) for kind in HOSTILE)],
)
def test_chunked_prompts_follow_the_reference_in_float64(shape: Mamba2Shape, kind: str) -> None:
    mine, theirs = StateLayer(shape, 3, 6, GPU), StateLayer(shape, 3, 6, torch.device("cpu"))
    for name in ("state", "conv", *shape.records):
        setattr(theirs, name, getattr(theirs, name).double())
    run, reference = (
        mamba2_cuda.bind(Mamba2Spec(GPU, shape)),
        mamba2_ref.bind(Mamba2Spec(theirs.state.device, shape)),
    )
    for i, seqs in enumerate(PROMPTS):
        m, dt, p = hostile(kind, *rows_of(sum(s.width for s in seqs), shape, i), params(shape))
        got = run(*wide(m, dt), p, mine, lay_out(SlotTable(3, 64, 64), seqs, GPU))
        batch = lay_out(SlotTable(3, 64, 64), seqs, theirs.state.device)
        want = reference(m.double().cpu(), dt.double().cpu(), doubled(p), theirs, batch)
        assert error(got, want) < 1e-3
        for s in seqs:
            for h in range(shape.n_head):
                assert error(mine.state[s.slot, h], theirs.state[s.slot, h]) < 3e-5
            assert error(mine.conv[s.slot, :3], theirs.conv[s.slot, :3]) < 1e-6
    assert not faults.record(GPU).any()


def wide(m: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
    """As slices of wider rows that are NaN elsewhere."""
    rows = torch.full((len(m), m.shape[1] + dt.shape[1] + 64), torch.nan, device=GPU)
    at = m.shape[1] + 4
    rows[:, : m.shape[1]], rows[:, at : at + dt.shape[1]] = m, dt
    return rows[:, : m.shape[1]], rows[:, at : at + dt.shape[1]]


@pytest.mark.parametrize("shape", [SUPER, NANO, SMALL])
def test_a_chunked_prompt_does_not_depend_on_its_neighbours_to_the_bit(shape: Mamba2Shape) -> None:
    p, rows, run, found = (
        params(shape),
        rows_of(900, shape),
        mamba2_cuda.bind(Mamba2Spec(GPU, shape)),
        [],
    )
    for before, after in (
        ([], []),
        ([Seq(0, 0, [0] * 150, SeqMode.KEEP), Seq(3, 0, [0] * 4)], [Seq(2, 0, [0] * 130, SeqMode.KEEP)]),
        ([Seq(3, 0, [0] * 6)], [Seq(0, 0, [0] * 2, SeqMode.KEEP)]),
        ([], []),
    ):
        layer, first = StateLayer(shape, 4, 6, GPU), sum(s.width for s in before)
        for t in layer.tensors():
            t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(9)))
        seqs = [*before, Seq(1, 0, [0] * 400, SeqMode.KEEP, 0, 3), *after]
        m, dt = (
            torch.cat([x[400 : 400 + first], x[:400], x[700:]])[: sum(s.width for s in seqs)]
            for x in rows
        )
        got = run(m, dt, p, layer, lay_out(SlotTable(4, 64, 64), seqs, GPU))
        found.append((got[first : first + 400], layer.state[1], layer.conv[1, :3]))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_hundred_prompts_without_waiting_give_what_waiting_ones_give() -> None:
    results = []
    for waits in (True, False):
        run, layer = mamba2_cuda.bind(Mamba2Spec(GPU, SMALL)), StateLayer(SMALL, 2, 4, GPU)
        (m, dt), p, table = rows_of(263, SMALL), params(SMALL), SlotTable(2, 64, 64)
        prompts = [lay_out(table, [Seq(0, 0, [0] * 259, SeqMode.KEEP, 0, 3), Seq(1, 0, [0] * 4)], GPU),
                   lay_out(table, [Seq(0, 0, [0] * 4), Seq(1, 0, [0] * 259, SeqMode.KEEP, 0, 2)], GPU)]  # fmt: skip
        out = torch.zeros(263, SMALL.n_head, SMALL.head_dim, device=GPU)
        for i in range(100):
            out += run(m, dt, p, layer, prompts[i % 2])
            if waits:
                torch.cuda.synchronize()
        results.append((out, layer.state))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_offsets_beyond_two_billion_elements() -> None:
    """K6: the last slot's state starts past 2^31 floats."""
    n_slot = 2**31 // (SUPER.n_head * SUPER.head_dim * SUPER.n_state) + 2
    if torch.cuda.mem_get_info()[0] < 5 * n_slot * 4 * 2**20:
        pytest.skip("needs 10 GB")
    layer, p, (m, dt) = StateLayer(SUPER, n_slot, 2, GPU), params(SUPER), rows_of(3, SUPER)
    small = StateLayer(SUPER, 1, 2, GPU)
    run, table = mamba2_cuda.bind(Mamba2Spec(GPU, SUPER)), SlotTable(n_slot, 2 * n_slot, 64)
    got = run(m, dt, p, layer, lay_out(table, [Seq(n_slot - 1, 0, [0] * 3, SeqMode.KEEP)], GPU))
    want = run(m, dt, p, small, lay_out(SlotTable(1, 2, 64), [Seq(0, 0, [0] * 3, SeqMode.KEEP)], GPU))
    assert (
        torch.equal(got, want)
        and torch.equal(layer.state[-1], small.state[0])
        and not layer.state[:-1].any()
    )
