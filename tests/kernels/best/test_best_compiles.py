"""The kernel of `best` compiles for every architecture, without a GPU and without spills."""

import pytest
from machines import compiled

from pyspec.cuda.jit import ARCHS
from pyspec.cuda.ops.best import cuda as best_cuda


@pytest.mark.parametrize("arch", ARCHS)
def test_best_compiles_for_every_architecture(arch: str) -> None:
    found = compiled("best", arch, best_cuda.defines())["best"]
    assert found.registers * best_cuda.THREADS * 2 * best_cuda.PER_SM <= 65536
