"""short_conv's CUDA kernel on a GPU: the op's own check in LFM2's shapes, graphs, and itself to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.ops.short_conv import cuda as short_conv_cuda
from pyspec.cuda.ops.short_conv import ref as short_conv_ref
from pyspec.cuda.ops.short_conv.op import short_conv
from pyspec.cuda.ops.short_conv.ref import ShortConvSpec
from pyspec.cuda.ops.short_conv.shape import ShortConvShape
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Seq, SeqMode, lay_out
from pyspec.slots.recurrent import StateLayer
from pyspec.slots.table import SlotTable

GPU = torch.device("cuda")
LFM2, ODD = ShortConvShape(2048, 3), ShortConvShape(140, 3)


def rows_of(n: int, shape: ShortConvShape, seed: int = 0) -> Tensor:
    """Slices of wider rows that are NaN elsewhere."""
    wide = torch.full((n, 3 * shape.n_channel + 8), torch.nan)
    wide[:, 4:-4] = torch.randn(n, 3 * shape.n_channel, generator=torch.Generator().manual_seed(seed))
    return wide.to(GPU)[:, 4:-4]


def taps_of(shape: ShortConvShape) -> Tensor:
    gen = torch.Generator().manual_seed(9)
    return torch.randn(shape.n_channel, shape.n_conv, generator=gen).to(GPU)


@pytest.mark.parametrize("shape", [LFM2, ODD, ShortConvShape(1536, 2), ShortConvShape(132, 5)])
def test_it_passes_the_ops_check(shape: ShortConvShape) -> None:
    spec = ShortConvSpec(GPU, shape)
    run = short_conv_cuda.bind(spec)
    assert short_conv_ref.check(run, short_conv_ref.bind(spec), spec) is None
    assert not faults.record(GPU).any()


def test_models_run_with_it() -> None:
    assert short_conv.chosen(ShortConvSpec(GPU, LFM2)).name == "cuda"


def test_a_thousand_rounds_without_waiting_give_what_waiting_rounds_give() -> None:
    """Errors of kernels that overlap show only without a wait in between."""
    results = []
    for waits in (True, False):
        run, layer = short_conv_cuda.bind(ShortConvSpec(GPU, LFM2)), StateLayer(LFM2, 2, 4, GPU)
        m, w, table = rows_of(8, LFM2), taps_of(LFM2), SlotTable(2, 64, 64)
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
        out = torch.zeros(8, LFM2.n_channel, device=GPU)
        for i in range(1000):
            out += run(m, w, layer, batches[i % 4])
            if waits:
                torch.cuda.synchronize()
        results.append((out, layer.conv))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_graph_serves_other_slots_and_widths() -> None:
    spec = ShortConvSpec(GPU, ODD)
    w, run, reference = taps_of(ODD), short_conv_cuda.bind(spec), short_conv_ref.bind(spec)
    layers = [StateLayer(ODD, 4, 6, GPU) for _ in range(2)]
    arena, m = Arena(4, 8, GPU), rows_of(8, ODD)
    graph, out = torch.cuda.CUDAGraph(), torch.empty(0)
    for i, seqs in enumerate((
        [Seq(0, 0, [0] * 8, SeqMode.KEEP)],
        [Seq(3, 0, [0] * 5), Seq(1, 0, [0] * 3, SeqMode.KEEP)],
        [Seq(1, 0, [0] * 2), Seq(0, 0, [0]), Seq(3, 0, [0] * 4, SeqMode.VERIFY, 0, 4)],
    )):  # fmt: skip
        batch = lay_out(SlotTable(4, 64, 64), seqs, GPU, arena=arena)
        if i == 0:
            run(m, w, StateLayer(ODD, 4, 6, GPU), batch)
            with torch.cuda.graph(graph):
                out = run(m, w, layers[0], batch)
        graph.replay()
        n = sum(s.width for s in seqs)
        want = reference(m[:n], w, layers[1], lay_out(SlotTable(4, 64, 64), seqs, GPU))
        assert torch.allclose(out[:n], want, rtol=1e-4, atol=1e-5) and not out[n:].any()
    assert torch.allclose(layers[0].conv[:, :2], layers[1].conv[:, :2], rtol=1e-5, atol=1e-6)


def test_a_prompt_gives_the_bits_of_verifies_of_any_width() -> None:
    spec, w, m, found = ShortConvSpec(GPU, LFM2), taps_of(LFM2), rows_of(1037, LFM2), []
    run = short_conv_cuda.bind(spec)
    for width in (1037, 17, 1):
        layer, table, at, fold, outs = StateLayer(LFM2, 3, 17, GPU), SlotTable(3, 64, 64), 0, 0, []
        while at < 1037:
            n = min(width, 1037 - at)
            keep = width > 17 or at + n == 1037
            mode = SeqMode.KEEP if keep else SeqMode.VERIFY
            batch = lay_out(table, [Seq(2, at, [0] * n, mode, 0, fold)], GPU)
            outs.append(run(m[at : at + n], w, layer, batch))
            at, fold = at + n, 0 if keep else n
        found.append((torch.cat(outs), layer.conv[2, :2].clone()))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))
