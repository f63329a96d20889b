"""`convolve` on a GPU against torch."""

import pytest
import torch

from pyspec.cuda.ops.convolve import cuda as convolve_cuda
from pyspec.cuda.ops.convolve.ref import ConvolveSpec, TorchConvolve

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(("n", "n_tap", "group"), [(32, 2, 8), (5120, 4, 64), (4096, 16, 128)])
def test_rows_are_the_references(n: int, n_tap: int, group: int) -> None:
    spec = ConvolveSpec(torch.device("cuda", 0), n, n_tap, group)
    assert convolve_cuda.limits(spec) is None
    assert convolve_cuda.check(convolve_cuda.bind(spec), TorchConvolve(spec), spec) is None
