"""Rows mixed with kept ones: the formula, and every implementation against it, alone and among others to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from machines import compiled

from pyspec.cpu import build
from pyspec.cuda.jit import ARCHS
from pyspec.cuda.ops.banked import cpu as banked_cpu
from pyspec.cuda.ops.banked import cuda as banked_cuda
from pyspec.cuda.ops.banked import ref as banked_ref
from pyspec.cuda.ops.banked.ref import BankedSpec

SPECS = [BankedSpec(CPU, 64, 1, 1e-6), BankedSpec(CPU, 36, 3, 1e-5), BankedSpec(CPU, 1100, 16, 1e-6)]


def drawn(spec: BankedSpec, n_row: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(n_row)
    rows = [torch.randn(n_row, spec.n, generator=gen) for _ in range(spec.n_kept + 1)]
    return rows[:-1], rows[-1], torch.randn(spec.n, generator=gen) / spec.n**0.5


def checked(bind: Any, spec: BankedSpec) -> None:
    own, reference = bind(spec), banked_ref.bind(spec)
    assert banked_cuda.check(own, reference, spec) is None
    wrong = banked_cuda.check(lambda kept, x, w: own(kept, x, 1.01 * w), reference, spec)
    assert wrong is not None
    kept, x, weight = drawn(spec, 7)
    whole = own(kept, x, weight)
    for r in (0, 3, 6):
        one = [t[r : r + 1].contiguous() for t in (*kept, x)]
        assert torch.equal(own(one[:-1], one[-1], weight)[0], whole[r])


def test_scores_are_of_normed_rows_and_sums_of_rows_as_they_are() -> None:
    spec = SPECS[1]
    kept, x, weight = drawn(spec, 5)
    got = banked_ref.bind(spec)(kept, x, weight)
    for r in range(5):
        rows = torch.stack([t[r] for t in (*kept, x)]).double()
        scores = rows / (rows.square().mean(-1, keepdim=True) + spec.eps).sqrt() @ weight.double()
        assert torch.allclose(got[r].double(), scores.softmax(0) @ rows, atol=1e-6)


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.n_kept}x{spec.n}")
def test_a_cpus_mix_is_the_references(spec: BankedSpec) -> None:
    assert banked_cpu.limits(spec) is None
    checked(banked_cpu.bind, spec)


@needs_compiler
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.n_kept}x{spec.n}")
def test_a_gpus_mix_is_the_references(spec: BankedSpec) -> None:
    with emulated_gpu():
        checked(banked_cuda.bind, spec)


def test_what_no_kernel_takes_is_said() -> None:
    many, odd = replace(SPECS[0], n_kept=17), replace(SPECS[0], n=30)
    gpu = [replace(spec, device=torch.device("cuda", 0)) for spec in (many, odd)]
    assert banked_cpu.limits(many) == "17 kept rows; the kernel takes 16"
    with emulated_gpu():
        assert banked_cuda.limits(gpu[0]) == "17 kept rows; the kernel takes 16"
        assert banked_cuda.limits(gpu[1]) == "rows of 30; the kernel takes multiples of 4"


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_mixes_compile_for_every_architecture(arch: str) -> None:
    for n in (1, 16):
        found = compiled("banked", arch, banked_cuda.FILE.defines(BankedSpec(CPU, 7168, n, 1e-5)))
        assert found["banked"].registers * banked_cuda.THREADS * 4 <= 65536
