"""rope_tail.cu, thread by thread on the CPU and on a card, against the reference; and compiles everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import CPU, GPU, Machine, cases, compiled
from sampling import few

from pyspec.cuda.jit import ARCHS
from pyspec.cuda.ops.rope_tail import cuda as tail_cuda
from pyspec.cuda.ops.rope_tail import ref as tail_ref
from pyspec.cuda.ops.rope_tail.ref import RopeTailSpec

SPEC = RopeTailSpec(CPU, 64, 16, True, 1e-6)
SHAPES = [SPEC, RopeTailSpec(CPU, 512, 64, True, 1e-6), RopeTailSpec(CPU, 128, 64, False, 1e-6), RopeTailSpec(CPU, 12, 6, True, 1e-3), RopeTailSpec(CPU, 20, 20, False, 1e-6)]  # fmt: skip


@cases(
    "spec",
    emulated=few(SHAPES, SPEC),
    card=[
        RopeTailSpec(GPU, dim, n_rot, normed, 1e-6)
        for dim, n_rot in ((512, 64), (128, 64), (32, 16))
        for normed in (True, False)
    ],
)
def test_heads_are_the_references(machine: Machine, spec: RopeTailSpec) -> None:
    with machine.started(seed=1):
        assert tail_cuda.check(tail_cuda.bind(spec), tail_ref.bind(spec), spec) is None


def test_its_check_finds_heads_that_are_not_normed(machine: Machine) -> None:
    with machine.started(seed=1):
        wrong = tail_cuda.bind(replace(SPEC, normed=False))
        assert "differ" in str(
            tail_cuda.check(
                lambda x, at, freq, _, sign: wrong(x, at, freq, None, sign), tail_ref.bind(SPEC), SPEC
            )
        )


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_the_kernel_compiles_for_every_architecture_without_spills(arch: str) -> None:
    for spec in SHAPES:
        found = compiled("rope_tail", arch, tail_cuda.FILE.defines(spec))
        assert all(of.registers * 256 <= 65536 for of in found.values())
