"""mamba2's CUDA kernels on a GPU: the op's own check in the real models' shapes, and themselves to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.kernels import mamba2_cuda, mamba2_ref
from pyspec.cuda.kernels.mamba2 import mamba2
from pyspec.cuda.kernels.mamba2_ref import Mamba2Spec, Params, make_params
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Seq, lay_out
from pyspec.slots.memory import Mamba2Shape, StateLayer
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
    wide = torch.randn(n, shape.n_channel + shape.n_head, generator=torch.Generator().manual_seed(seed)).to(GPU)
    m, dt = wide.split([shape.n_channel, shape.n_head], 1)
    return m, dt


@pytest.mark.parametrize("columns", mamba2_cuda.COLUMNS)
@pytest.mark.parametrize("shape", [SUPER, NANO, PUZZLE, SMALL, Mamba2Shape(8, 128, 4, 64, 4)])
def test_it_passes_the_ops_check(shape: Mamba2Shape, columns: int) -> None:
    spec = Mamba2Spec(GPU, shape)
    assert mamba2_ref.check(mamba2_cuda.bind(spec, columns=columns), mamba2_ref.bind(spec), spec) is None
    assert not faults.record(GPU).any()


@pytest.mark.parametrize("shape", [SUPER, NANO])
def test_it_is_what_models_run_with(shape: Mamba2Shape) -> None:
    assert mamba2.chosen(Mamba2Spec(GPU, shape)).name == "cuda"


def run_way(way: str, columns: int, neighbours: bool) -> tuple[Tensor, Tensor]:
    """Slot 1's 40 tokens as `way` says. Returns its state and its outputs."""
    run, layer = mamba2_cuda.bind(Mamba2Spec(GPU, SMALL), columns=columns), StateLayer(SMALL, 3, 6, GPU)
    (m, dt), (more_m, more_dt), p = rows_of(40, SMALL), rows_of(7, SMALL, 5), params(SMALL)
    outs, at, fold = [], 0, 0
    for n, keep in WAYS[way]:
        seqs, first, part = [Seq(1, 0, [0] * n, keep, 0, fold)], 0, slice(at, at + n)
        rows = m[part], dt[part]
        if neighbours:
            seqs, first = [Seq(2, 0, [0] * 2), *seqs, Seq(0, 0, [0] * 5, True)], 2
            rows = tuple(torch.cat([x[:2], y, x[2:]]) for x, y in zip((more_m, more_dt), rows, strict=True))
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
    """Errors of kernels that overlap show only where nobody waits in between."""
    results = []
    for waits in (True, False):
        run, layer = mamba2_cuda.bind(Mamba2Spec(GPU, NANO)), StateLayer(NANO, 2, 4, GPU)
        (m, dt), p, table = rows_of(8, NANO), params(NANO), SlotTable(2, 64, 64)
        batches = [
            lay_out(table, [Seq(0, 0, [0] * 4, False, 0, fold), Seq(1, 0, [0] * 4, False, 0, 3 - fold)], GPU)
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
        [Seq(0, 0, [0] * 8, True)],
        [Seq(3, 0, [0] * 5), Seq(1, 0, [0] * 3, True)],
        [Seq(1, 0, [0] * 2), Seq(0, 0, [0]), Seq(3, 0, [0] * 4, False, 0, 4)],
    )):  # fmt: skip
        batch = lay_out(SlotTable(4, 64, 64), seqs, GPU, arena=arena)
        if i == 0:
            run(m, dt, p, StateLayer(SMALL, 4, 6, GPU), batch)
            with torch.cuda.graph(graph):
                out = run(m, dt, p, layers[0], batch)
        graph.replay()
        n = sum(s.width for s in seqs)
        want = reference(m[:n], dt[:n], p, layers[1], lay_out(SlotTable(4, 64, 64), seqs, GPU))
        assert torch.allclose(out[:n], want, rtol=1e-4, atol=1e-3)
    assert torch.allclose(layers[0].state, layers[1].state, rtol=1e-4, atol=1e-4)


def test_offsets_beyond_two_billion_elements() -> None:
    """K6: the last slot's state starts past 2^31 floats."""
    n_slot = 2**31 // (SUPER.n_head * SUPER.head_dim * SUPER.n_state) + 2
    if torch.cuda.mem_get_info()[0] < 5 * n_slot * 4 * 2**20:
        pytest.skip("needs 10 GB")
    layer, p, (m, dt) = StateLayer(SUPER, n_slot, 2, GPU), params(SUPER), rows_of(3, SUPER)
    small = StateLayer(SUPER, 1, 2, GPU)
    run, table = mamba2_cuda.bind(Mamba2Spec(GPU, SUPER)), SlotTable(n_slot, 2 * n_slot, 64)
    got = run(m, dt, p, layer, lay_out(table, [Seq(n_slot - 1, 0, [0] * 3, True)], GPU))
    want = run(m, dt, p, small, lay_out(SlotTable(1, 2, 64), [Seq(0, 0, [0] * 3, True)], GPU))
    assert torch.equal(got, want) and torch.equal(layer.state[-1], small.state[0]) and not layer.state[:-1].any()
