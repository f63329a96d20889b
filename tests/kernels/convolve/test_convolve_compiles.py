"""The kernel of `convolve` compiles for every architecture, without a GPU and without spills."""

import pytest
import torch

from pyspec.cuda.jit import ARCHS, compile_cubin
from pyspec.cuda.ops.convolve import cuda as convolve_cuda
from pyspec.cuda.ops.convolve.ref import ConvolveSpec

pytest.importorskip("cuda.core")


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_convolve_compiles_for_every_architecture(arch: str) -> None:
    for n, n_tap, group in ((32, 2, 8), (5120, 4, 64), (4096, convolve_cuda.MAX_TAPS, 128)):
        spec = ConvolveSpec(torch.device("cuda", 0), n, n_tap, group)
        found = compile_cubin("convolve", arch, convolve_cuda.defines(spec), use_cache=False)
        assert found.resources["convolve"].spill_bytes == 0
