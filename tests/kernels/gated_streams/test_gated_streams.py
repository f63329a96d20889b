"""gated_streams.cu, thread by thread on the CPU and on a card, against the reference; and compiles everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from machines import CPU, Machine, cases, compiled

from pyspec.cuda.jit import ARCHS
from pyspec.cuda.ops.gated_streams import cuda as gated_cuda
from pyspec.cuda.ops.gated_streams.ref import GatedStreams, GatedStreamsSpec, check

SPEC = GatedStreamsSpec(CPU, 4, 64, 1e-6)


@cases(
    "n_stream, n",
    emulated=[(4, 64), (3, 24), (2, 1028), (1, 4)],
    card=[(4, 2560), (3, 24), (8, 16384)],
)
def test_streams_are_the_references(machine: Machine, n_stream: int, n: int) -> None:
    """The op's own check, of columns that end within a warp and beyond those of one CTA; it finds another number of streams."""
    spec = replace(SPEC, n_stream=n_stream, n=n, device=machine.device)
    with machine.started():
        own = gated_cuda.bind(spec)
        assert check(own, GatedStreams(spec), spec) is None
        other = GatedStreams(replace(spec, eps=1.0))
        assert "norm of 1 rows" in str(check(own, other, spec))


@cases(both=[()])
def test_a_row_that_is_no_number_stays_alone(machine: Machine) -> None:
    spec = replace(SPEC, device=machine.device)
    x, w = torch.randn(5, 256, device=spec.device), torch.ones(256, device=spec.device)
    x[2, 7] = torch.nan
    with machine.started():
        own = gated_cuda.bind(spec)
        found = own.norm(x, w), own.read(x, x), own.merge(x, x[:, :64], x[:, 64:68]), own.bend(x[:, 5:9])
        for got in found[:3]:
            assert got[2].isnan().any() and got[[0, 1, 3, 4]].isfinite().all()
        assert found[3][2].isnan().any() and own.norm(x[:0], w).shape == (0, 256)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_for_every_architecture(arch: str) -> None:
    for n in (64, 2560, 16384):
        spec = replace(SPEC, n=n)
        assert set(compiled("gated_streams", arch, gated_cuda.FILE.defines(spec))) == set(
            gated_cuda.FORMS
        )
