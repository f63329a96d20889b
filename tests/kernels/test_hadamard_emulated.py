"""hadamard.cu run thread by thread on the CPU, and compiled; its limits."""

from __future__ import annotations

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler

from pyspec.cuda import jit
from pyspec.cuda.ops.hadamard import cuda as hadamard_cuda
from pyspec.cuda.ops.hadamard.ref import HadamardSpec, bind, check


@needs_compiler
@pytest.mark.parametrize(("dim", "n"), [(64, 64), (96, 32), (256, 256), (128, 16)])
def test_heads_have_the_bits_of_the_reference(dim: int, n: int) -> None:
    spec = HadamardSpec(CPU, dim, n)
    with emulated_gpu(seed=dim):
        assert check(hadamard_cuda.bind(spec), bind(spec), spec) is None
        assert hadamard_cuda.bind(spec)(torch.zeros(0, 3, dim)).shape == (0, 3, dim)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_it_compiles_everywhere(arch: str) -> None:
    pytest.importorskip("cuda.core")
    macros = hadamard_cuda.FILE.defines(HadamardSpec(CPU, 256, 256))
    found = jit.compile_cubin("hadamard", arch, macros, use_cache=False).resources["hadamard"]
    assert found.spill_bytes == 0
