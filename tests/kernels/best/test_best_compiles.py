"""The kernel of `best` compiles for every architecture, without a GPU and without spills."""

import pytest

from pyspec.cuda.jit import ARCHS, compile_cubin
from pyspec.cuda.ops.best import cuda as best_cuda


@pytest.mark.parametrize("arch", ARCHS)
def test_best_compiles_for_every_architecture(arch: str) -> None:
    found = compile_cubin("best", arch, best_cuda.defines(), use_cache=False).resources["best"]
    assert found.spill_bytes == 0 and found.registers * best_cuda.THREADS * 2 * best_cuda.PER_SM <= 65536
