"""streams.cu, thread by thread on the CPU and on a card, against the reference and itself to the bit; and compiles everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from machines import CPU, Machine, cases, compiled

from pyspec.cuda.jit import ARCHS
from pyspec.cuda.ops.streams import cuda as streams_cuda
from pyspec.cuda.ops.streams.ref import StreamsSpec, TorchStreams

SPEC = StreamsSpec(CPU, 4, 64, 20, 1e-6, 1e-6)


@pytest.mark.sampled(1, most=1)
@cases(
    "n, n_iter, seed",
    emulated=[(64, 20, 0), (4, 1, 1), (132, 2, 2), (1100, 3, 3)],
    card=[(4096, 20, 0), (7168, 20, 0), (64, 20, 0)],
)
def test_streams_are_the_references(machine: Machine, n: int, n_iter: int, seed: int) -> None:
    """The op's own check; columns that end within a warp, within a part, and beyond the columns of one CTA; rows that are normed on the way
    have the bits of rows.cu."""
    spec = replace(SPEC, n=n, n_iter=n_iter, device=machine.device)
    with machine.started(seed=seed):
        assert streams_cuda.check(streams_cuda.bind(spec), TorchStreams(spec), spec) is None


def test_a_row_that_is_no_number_stays_alone(machine: Machine) -> None:
    gen = torch.Generator().manual_seed(4)
    x, mix = torch.randn(9, 4, 64, generator=gen), streams_cuda.random_mix(24, SPEC, gen)
    with machine.started(seed=1):
        own = streams_cuda.bind(SPEC)
        right = own.split(x, mix)
        x[3, 2, 5] = torch.nan
        others = torch.arange(9) != 3
        for got, want in zip(own.split(x, mix), right, strict=True):
            assert torch.equal(got[others], want[others]) and got[3].isnan().any()
        assert own.head(x[:0], streams_cuda.random_mix(4, SPEC, gen)).shape == (0, 64)


def test_a_check_finds_other_numbers_of_steps(machine: Machine) -> None:
    spec = replace(SPEC, n_iter=1)
    with machine.started():
        assert "comb" in str(streams_cuda.check(streams_cuda.bind(spec), TorchStreams(SPEC), SPEC))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_streams_compile_for_every_architecture(arch: str) -> None:
    for n in (64, 4096, 7168):
        for n_iter in (20, 0):
            found = compiled("streams", arch, streams_cuda.defines(n, n_iter))
            assert found["streams_read_rows"].registers * streams_cuda.READERS <= 65536
            assert found["streams_parts"].registers * streams_cuda.THREADS * 2 <= 65536
            assert ("streams_merge" in found) == (n_iter > 0)
