"""`convolve` on CPUs, the reference by a loop over rows, and the limits of the GPU's kernel."""

from __future__ import annotations

import pytest
import torch

from pyspec.cpu.kernels import missing
from pyspec.cuda.ops.convolve import cpu as convolve_cpu
from pyspec.cuda.ops.convolve import cuda as convolve_cuda
from pyspec.cuda.ops.convolve.ref import ConvolveSpec, TorchConvolve

CPU = torch.device("cpu")


@pytest.mark.skipif(missing() is not None, reason="no C++ kernels")
@pytest.mark.parametrize(("n", "n_tap", "group"), [(32, 2, 8), (40, 3, 4), (15, 1, 5), (5120, 4, 64)])
def test_the_cpu_kernel_gives_the_references_rows(n: int, n_tap: int, group: int) -> None:
    spec = ConvolveSpec(CPU, n, n_tap, group)
    assert convolve_cuda.check(convolve_cpu.bind(spec), TorchConvolve(spec), spec) is None


def test_the_reference_is_its_sentence() -> None:
    spec, gen = ConvolveSpec(CPU, 12, 3, 4), torch.Generator().manual_seed(1)
    x, base = torch.randn(6, 12, generator=gen), torch.randn(2, 3, 12, generator=gen)
    given, seqs = torch.randn(6, 18, generator=gen), [0, 0, 0, 0, 1, 1]
    row_seq = torch.tensor(seqs, dtype=torch.int32)
    for side in (0, 1):
        got = TorchConvolve(spec)(x, given, base, row_seq, side, x)
        for row in range(6):
            for c in range(12):
                want = float(x[row, c])
                for t in range(3):
                    if row >= t and seqs[row - t] == seqs[row]:
                        weight = base[side, t, c] + given[row, side * 9 + t * 3 + c // 4]
                        want += float(weight * x[row - t, c])
                assert abs(float(got[row, c]) - want) < 1e-5


def test_what_the_gpus_kernel_can_not_do_is_refused() -> None:
    gpu = torch.device("cuda", 0)
    assert convolve_cuda.limits(ConvolveSpec(CPU, 64, 2, 8)) == "runs on NVIDIA GPUs only"
    assert convolve_cuda.limits(ConvolveSpec(gpu, 5120, 4, 64)) is None
    assert "groups of 6 of 60" in (convolve_cuda.limits(ConvolveSpec(gpu, 60, 2, 6)) or "")
    assert "17 taps" in (convolve_cuda.limits(ConvolveSpec(gpu, 64, 17, 8)) or "")
