"""The kernel of `norms` compiles for every architecture, without a GPU and without spills."""

import pytest
import torch
from machines import compiled

from pyspec.cuda.jit import ARCHS
from pyspec.cuda.ops.norms import cuda as norms_cuda
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.cuda.ops.rows import cuda as rows_cuda

pytest.importorskip("cuda.core")


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_norms_compile_for_every_architecture(arch: str) -> None:
    for n in (4, 2048, 5120, norms_cuda.MAX_COLUMNS):
        for layer in (False, True):
            found = compiled("norms", arch, norms_cuda.defines(n, layer))["norms"]
            assert found.registers * norms_cuda.threads_for(n) <= 65536, (
                n,
                found,
            )
            assert found.registers * norms_cuda.threads_for(n) <= 32768 or n > 8192, (
                n,
                found,
            )  # beside a product


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_norms_that_write_rows_compile_for_every_architecture(arch: str) -> None:
    for n in (2816, 5376, norms_cuda.MAX_INTO):
        for layout in (0, 2) if arch == "sm_90a" else (0,):
            macros = norms_cuda.defines(n, False, layout)
            found = compiled("norms", arch, macros)["norms"]
            assert found.registers <= 64 or n > 5376, (n, found)  # beside a product


def test_a_row_has_a_thread_for_four_columns_up_to_as_many_as_other_rows_have() -> None:
    assert [norms_cuda.threads_for(n) for n in (4, 128, 1152, 2048, 5120, 16384)] == [
        *(32, 32, 288, 512, 512, rows_cuda.THREADS)
    ]


def test_what_it_can_not_do_is_refused() -> None:
    gpu = torch.device("cuda", 0)
    assert norms_cuda.limits(NormsSpec(torch.device("cpu"), 64, 1e-6)) == "runs on NVIDIA GPUs only"
    assert norms_cuda.limits(NormsSpec(gpu, 5120, 1e-6)) is None
    assert "66 columns" in (norms_cuda.limits(NormsSpec(gpu, 66, 1e-6)) or "")
    assert "16388 columns" in (norms_cuda.limits(NormsSpec(gpu, 16388, 1e-6)) or "")
