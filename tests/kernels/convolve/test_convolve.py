"""`convolve`: the reference by a loop, on CPUs, and convolve.cu on every machine and for every architecture; its limits."""

from __future__ import annotations

import pytest
import torch
from machines import CPU, Machine, cases, compiled

from pyspec.cpu.kernels import missing
from pyspec.cuda.jit import ARCHS
from pyspec.cuda.ops.convolve import cpu as convolve_cpu
from pyspec.cuda.ops.convolve import cuda as convolve_cuda
from pyspec.cuda.ops.convolve import ref as convolve_ref
from pyspec.cuda.ops.convolve.ref import ConvolveSpec

pytestmark = pytest.mark.sampled(1)


@pytest.mark.skipif(missing() is not None, reason="no C++ kernels")
@pytest.mark.parametrize(("n", "n_tap", "group"), [(32, 2, 8), (40, 3, 4), (15, 1, 5), (5120, 4, 64)])
def test_the_cpu_kernel_gives_the_references_rows(n: int, n_tap: int, group: int) -> None:
    spec = ConvolveSpec(CPU, n, n_tap, group)
    assert convolve_cuda.check(convolve_cpu.bind(spec), convolve_ref.bind(spec), spec) is None


def test_the_reference_is_its_sentence() -> None:
    spec, gen = ConvolveSpec(CPU, 12, 3, 4), torch.Generator().manual_seed(1)
    x, base = torch.randn(6, 12, generator=gen), torch.randn(2, 3, 12, generator=gen)
    given, seqs = torch.randn(6, 18, generator=gen), [0, 0, 0, 0, 1, 1]
    row_seq = torch.tensor(seqs, dtype=torch.int32)
    for side in (0, 1):
        got = convolve_ref.bind(spec)(x, given, base, row_seq, side, x)
        for row in range(6):
            for c in range(12):
                want = float(x[row, c])
                for t in range(3):
                    if row >= t and seqs[row - t] == seqs[row]:
                        weight = base[side, t, c] + given[row, side * 9 + t * 3 + c // 4]
                        want += float(weight * x[row - t, c])
                assert abs(float(got[row, c]) - want) < 1e-5


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
        assert convolve_cuda.check(convolve_cuda.bind(spec), convolve_ref.bind(spec), spec) is None


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_convolve_compiles_for_every_architecture(arch: str) -> None:
    for n, n_tap, group in ((32, 2, 8), (5120, 4, 64), (4096, convolve_cuda.MAX_TAPS, 128)):
        spec = ConvolveSpec(torch.device("cuda", 0), n, n_tap, group)
        compiled("convolve", arch, convolve_cuda.FILE.defines(spec))
