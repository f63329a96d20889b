"""`ahead` on a GPU against the reference, run at once and as replayed by graphs."""

import pytest
import torch

from pyspec.cuda.ops.ahead import cuda as ahead_cuda
from pyspec.cuda.ops.ahead.op import ahead
from pyspec.cuda.ops.ahead.ref import AheadSpec, TorchAhead
from pyspec.slots.batch import Seq, lay_out

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda", 0)
SPEC = AheadSpec(CUDA)


def test_accept_and_move_are_the_references() -> None:
    assert ahead_cuda.limits(SPEC) is None
    assert ahead_cuda.check(ahead_cuda.bind(SPEC), ahead.reference.bind(SPEC), SPEC) is None


def test_the_reference_is_that_of_a_cpu() -> None:
    assert ahead_cuda.check(TorchAhead(), ahead_cuda.bind(SPEC), SPEC) is None


def test_graphs_replay_accept_and_move() -> None:
    own = ahead_cuda.bind(SPEC)
    _, table, arena = ahead_cuda.verify([1] * 6, CUDA, torch.Generator().manual_seed(0))
    seqs = [Seq(i, 3 * i, [0], n_out=1, slack=20) for i in range(5)]
    batch = lay_out(table, seqs, CUDA, arena=arena)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        own.step(batch)
    for n in (3, 12):
        batch = lay_out(table, seqs, CUDA, arena=arena)
        for _ in range(n):
            graph.replay()
        got = batch.positions.clone(), batch.kv_rows.clone(), batch.hi.clone()
        there = lay_out(table, [Seq(i, 3 * i + n, [0], n_out=1) for i in range(5)], CUDA, arena=arena)
        assert all(
            torch.equal(a, b)
            for a, b in zip(got, (there.positions, there.kv_rows, there.hi), strict=True)
        )
