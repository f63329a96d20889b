"""Products of 8-bit rows, which `--cpu-activations q8` requests."""

from __future__ import annotations

import pytest
import torch
from eight_rig import eight_rigs, eight_types
from hostile import Rig

from pyspec.cpu import build
from pyspec.cuda.kernel_context import KernelContext, within
from pyspec.cuda.ops.linear.cpu import CpuLinearSpec, sample
from pyspec.cuda.ops.linear.op import linear_cpu
from pyspec.cuda.packed_cpu import CPU, CpuMatrix, spec_of
from pyspec.gguf import GGMLType as G

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
Q8 = KernelContext(cpu_rows="q8")


@pytest.mark.parametrize(
    ("name", "rig"), list(eight_rigs()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_product_of_eight_bits(name: str, rig: Rig) -> None:
    assert rig() is None


def test_the_usual_types_have_it() -> None:
    assert {G.Q4_0, G.Q4_K, G.Q5_0, G.Q5_K, G.Q6_K, G.MXFP4} <= set(eight_types())
    assert all(linear_cpu.runs_as("cpu", CpuLinearSpec(CPU, type, 8)) for type in eight_types())


def test_a_context_decides_for_its_matrices() -> None:
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(3, 512, generator=gen)
    raws = {t: sample(t, 16, 512, gen) for t in (G.Q4_K, G.Q8_0, G.F16)}
    exact = CpuMatrix([(raw, t, 1.0) for t, raw in raws.items()])
    with within(Q8):
        assert spec_of(G.Q4_K).bits == 8 and spec_of(G.F16).bits == 16
        rough = CpuMatrix([(raw, t, 1.0) for t, raw in raws.items()])
        beside = exact(x)
    a, b = exact(x), rough(x)
    assert torch.equal(a, beside), "a matrix keeps the rows that it was made for"
    off = (a - b).norm(dim=0) / a.norm(dim=0)
    assert 1e-4 < off[:16].max() < 0.05 and torch.equal(a[:, 32:], b[:, 32:])
