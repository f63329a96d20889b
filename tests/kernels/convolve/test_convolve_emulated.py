"""convolve.cu runs thread by thread on the CPU, against the reference."""

from __future__ import annotations

import pytest
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler

from pyspec.cuda.ops.convolve import cuda as convolve_cuda
from pyspec.cuda.ops.convolve.ref import ConvolveSpec, TorchConvolve

pytestmark = [needs_compiler, pytest.mark.sampled(1)]


@pytest.mark.parametrize("seed", (0, 1))
@pytest.mark.parametrize(("n", "n_tap", "group"), [(32, 2, 8), (640, 4, 64), (520, 3, 4)])
def test_rows_are_the_references(n: int, n_tap: int, group: int, seed: int) -> None:
    """The op's own check."""
    spec = ConvolveSpec(CPU, n, n_tap, group)
    with emulated_gpu(seed=seed):
        assert convolve_cuda.check(convolve_cuda.bind(spec), TorchConvolve(spec), spec) is None
