"""embed.cu and angles.cu run thread by thread on the CPU: the reference's bits, and tokens that do not exist."""

from __future__ import annotations

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler

from pyspec.cuda import faults
from pyspec.cuda.op import FaultPlace
from pyspec.cuda.ops.angles import cuda as angles_cuda
from pyspec.cuda.ops.angles import ref as angles_ref
from pyspec.cuda.ops.angles.ref import AnglesSpec
from pyspec.cuda.ops.embed import cuda as embed_cuda
from pyspec.cuda.ops.embed.ref import EmbedSpec, TorchEmbed
from pyspec.gguf import GGMLType

pytestmark = [needs_compiler, pytest.mark.sampled(1)]


@pytest.mark.sampled(most=4)
@pytest.mark.parametrize("type", embed_cuda.TYPES)
@pytest.mark.parametrize("n_in", [256, 1280])
def test_rows_of_any_bytes_have_the_reference_s_bits(type: GGMLType, n_in: int) -> None:
    spec = EmbedSpec(CPU, type, n_in)
    with emulated_gpu(seed=n_in):
        assert embed_cuda.check(embed_cuda.bind(spec), TorchEmbed(spec), spec) is None
        assert faults.record(CPU).tolist() == [0] * 5


@pytest.mark.parametrize(
    ("type", "n_in"),
    [(GGMLType.Q8_0, 32), (GGMLType.Q4_0, 1056), (GGMLType.F32, 4), (GGMLType.F16, 1028)],
)
def test_narrow_rows_and_rows_that_end_inside_of_a_part(type: GGMLType, n_in: int) -> None:
    spec = EmbedSpec(CPU, type, n_in)
    with emulated_gpu((8, 0), seed=3):
        assert embed_cuda.check(embed_cuda.bind(spec), TorchEmbed(spec), spec) is None


def test_angles_are_the_references() -> None:
    spec = AnglesSpec(CPU)
    with emulated_gpu():
        own = angles_cuda.bind(spec)
        assert angles_cuda.check(own, angles_ref.angles, spec) is None
        assert [x.shape for x in own(torch.arange(0), torch.ones(4), 1.0)] == [(0, 1, 4)] * 2


def test_angles_beyond_the_threads_of_a_block_are_the_references() -> None:
    gen = torch.Generator().manual_seed(1)
    spec, n = EmbedSpec(CPU, GGMLType.F32, 8), embed_cuda.THREADS + 5
    raw, tokens, positions = (
        embed_cuda.any_bytes(spec.type, 8, 4, gen),
        torch.tensor([1, 3]),
        torch.tensor([77, 5]),
    )
    freq = angles_cuda.frequencies(n, CPU)
    with emulated_gpu():
        x, got = embed_cuda.bind(spec).rows_and_angles(raw, tokens, positions, freq, 1.0)
    want, angles = TorchEmbed(spec).rows_and_angles(raw, tokens, positions, freq, 1.0)
    assert torch.equal(embed_cuda.bits(x), embed_cuda.bits(want))
    for a, b in zip(got, angles, strict=True):
        assert torch.allclose(a, b, rtol=0.0, atol=angles_cuda.OFF)


@pytest.mark.parametrize(
    ("bad", "seen"), [(7, 7), (-1, -1), (1 << 40, -1), (-(1 << 40), -1), (2**31, -1)]
)
def test_a_token_that_does_not_exist_is_reported_and_the_other_rows_are_right(
    bad: int, seen: int
) -> None:
    spec, gen = EmbedSpec(CPU, GGMLType.Q8_0, 64), torch.Generator().manual_seed(2)
    raw, tokens = embed_cuda.any_bytes(spec.type, 64, 7, gen), torch.tensor([6, bad, 0])
    with emulated_gpu():
        x = embed_cuda.bind(spec).rows(raw, tokens)
        assert faults.record(CPU).tolist() == [1, embed_cuda.OP_ID, 1, seen, 7]
    assert faults.fault_of(embed_cuda.OP_ID, 0, 0, 0).names is FaultPlace.ROW
    want = TorchEmbed(spec).rows(raw, torch.tensor([6, 0, 0]))
    assert torch.equal(embed_cuda.bits(x), embed_cuda.bits(want))


def test_no_rows_are_no_launch() -> None:
    spec = EmbedSpec(CPU, GGMLType.Q8_0, 64)
    raw, none = torch.zeros(3, 68, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    with emulated_gpu():
        x, (cos, sin) = embed_cuda.bind(spec).rows_and_angles(raw, none, none, torch.ones(8), 1.0)
    assert x.shape == (0, 64) and cos.shape == sin.shape == (0, 1, 8)
