"""`heads` on a GPU: matrices of every type against the reference, and a graph that reads its rows anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from heads_cases import SIZES, spec_of

from pyspec.cuda.ops.heads import cuda as heads_cuda
from pyspec.cuda.ops.heads import ref as heads_ref
from pyspec.cuda.ops.heads.op import heads, shapes
from pyspec.cuda.ops.linear.cpu import sample

GPU = torch.device("cuda", 0)
SPECS = {name: replace(spec_of(name), device=GPU) for name in SIZES}
SPECS |= {f"standard {i}": spec for i, spec in enumerate(shapes(GPU))}


@pytest.mark.parametrize("name", SPECS)
def test_products_are_the_references(name: str) -> None:
    spec = SPECS[name]
    assert heads_cuda.limits(spec) is None
    assert heads_ref.check(heads_cuda.bind(spec), heads_ref.bind(spec), spec) is None


def test_a_captured_graph_reads_its_rows_anew() -> None:
    spec = SPECS["standard 0"]
    assert heads.chosen(spec).name == "cuda"
    gen = torch.Generator().manual_seed(1)
    run = heads.bind(spec)(sample(spec.type, spec.n_head * spec.n_out, spec.n_in, gen).to(GPU))
    x = torch.randn(17, spec.n_head, 192, device=GPU)
    run(x[..., : spec.n_in])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x[..., : spec.n_in])
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, run(x[..., : spec.n_in]))
