"""convolve.cu against the reference, thread by thread on the CPU and on a card; it compiles for every architecture without spills."""

from __future__ import annotations

import pytest
import torch
from machines import Machine, cases, compiled

from pyspec.cuda.jit import ARCHS
from pyspec.cuda.ops.convolve import cuda as convolve_cuda
from pyspec.cuda.ops.convolve.ref import ConvolveSpec, TorchConvolve

pytestmark = pytest.mark.sampled(1)


@cases(
    "n, n_tap, group",
    emulated=[(32, 2, 8), (640, 4, 64), (520, 3, 4)],
    card=[(32, 2, 8), (5120, 4, 64), (4096, 16, 128)],
    seeds=(0, 1),
)
def test_rows_are_the_references(machine: Machine, n: int, n_tap: int, group: int) -> None:
    """The op's own check."""
    spec = ConvolveSpec(machine.device, n, n_tap, group)
    assert machine.is_emulated or convolve_cuda.limits(spec) is None
    with machine.started():
        assert convolve_cuda.check(convolve_cuda.bind(spec), TorchConvolve(spec), spec) is None


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_convolve_compiles_for_every_architecture(arch: str) -> None:
    for n, n_tap, group in ((32, 2, 8), (5120, 4, 64), (4096, convolve_cuda.MAX_TAPS, 128)):
        spec = ConvolveSpec(torch.device("cuda", 0), n, n_tap, group)
        compiled("convolve", arch, convolve_cuda.defines(spec))
