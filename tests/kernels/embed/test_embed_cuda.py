"""embed.cu and angles.cu: the reference's bits, and tokens that do not exist; on a card tables of more bytes than 32 bits count, and graphs."""

from __future__ import annotations

import pytest
import torch
from machines import CPU, NO_FAULT, ON_CARD, Machine, cases

from pyspec.cuda import faults
from pyspec.cuda.op import FaultPlace
from pyspec.cuda.ops.angles import cuda as angles_cuda
from pyspec.cuda.ops.angles import ref as angles_ref
from pyspec.cuda.ops.angles.ref import AnglesSpec
from pyspec.cuda.ops.embed import cuda as embed_cuda
from pyspec.cuda.ops.embed.ref import EmbedSpec, TorchEmbed
from pyspec.gguf import GGMLType

pytestmark = pytest.mark.sampled(1)


@pytest.mark.sampled(most=4)
@pytest.mark.parametrize("type", embed_cuda.TYPES)
@cases("n_in", emulated=[256, 1280], card=[256, 2048, 5120])
def test_rows_of_any_bytes_have_the_reference_s_bits(
    machine: Machine, type: GGMLType, n_in: int
) -> None:
    spec = EmbedSpec(machine.device, type, n_in)
    assert machine.is_emulated or embed_cuda.limits(spec) is None
    with machine.started(seed=n_in):
        assert embed_cuda.check(embed_cuda.bind(spec), TorchEmbed(spec), spec) is None
        assert machine.faults().tolist() == NO_FAULT


@pytest.mark.parametrize(
    ("type", "n_in"),
    [(GGMLType.Q8_0, 32), (GGMLType.Q4_0, 1056), (GGMLType.F32, 4), (GGMLType.F16, 1028)],
)
def test_narrow_rows_and_rows_that_end_inside_of_a_part(
    machine: Machine, type: GGMLType, n_in: int
) -> None:
    spec = EmbedSpec(CPU, type, n_in)
    with machine.started((8, 0), seed=3):
        assert embed_cuda.check(embed_cuda.bind(spec), TorchEmbed(spec), spec) is None


def test_angles_are_the_references(machine: Machine) -> None:
    spec = AnglesSpec(CPU)
    with machine.started():
        own = angles_cuda.bind(spec)
        assert angles_cuda.check(own, angles_ref.angles, spec) is None
        assert [x.shape for x in own(torch.arange(0), torch.ones(4), 1.0)] == [(0, 1, 4)] * 2


def test_angles_beyond_the_threads_of_a_block_are_the_references(machine: Machine) -> None:
    gen = torch.Generator().manual_seed(1)
    spec, n = EmbedSpec(CPU, GGMLType.F32, 8), embed_cuda.THREADS + 5
    raw, tokens, positions = (
        embed_cuda.any_bytes(spec.type, 8, 4, gen),
        torch.tensor([1, 3]),
        torch.tensor([77, 5]),
    )
    freq = angles_cuda.frequencies(n, CPU)
    with machine.started():
        x, got = embed_cuda.bind(spec).rows_and_angles(raw, tokens, positions, freq, 1.0)
    want, angles = TorchEmbed(spec).rows_and_angles(raw, tokens, positions, freq, 1.0)
    assert torch.equal(embed_cuda.bits(x), embed_cuda.bits(want))
    for a, b in zip(got, angles, strict=True):
        assert torch.allclose(a, b, rtol=0.0, atol=angles_cuda.OFF)


@cases(
    "bad, seen, type",
    emulated=[
        (bad, seen, GGMLType.Q8_0)
        for bad, seen in ((7, 7), (-1, -1), (1 << 40, -1), (-(1 << 40), -1), (2**31, -1))
    ],
    card=[(7, 7, GGMLType.F16)],
)
def test_a_token_that_does_not_exist_is_reported_and_the_other_rows_are_right(
    machine: Machine, bad: int, seen: int, type: GGMLType
) -> None:
    spec, gen = EmbedSpec(machine.device, type, 64), torch.Generator().manual_seed(2)
    raw = embed_cuda.any_bytes(spec.type, 64, 7, gen).to(machine.device)
    tokens, none = (torch.tensor([6, i, 0], device=machine.device) for i in (bad, 0))
    with machine.started():
        x = embed_cuda.bind(spec).rows(raw, tokens)
        machine.waited()
        assert machine.faults().tolist() == [1, embed_cuda.OP_ID, 1, seen, 7]
        machine.faults().zero_()
    assert faults.fault_of(embed_cuda.OP_ID, 0, 0, 0).names is FaultPlace.ROW
    assert torch.equal(embed_cuda.bits(x), embed_cuda.bits(TorchEmbed(spec).rows(raw, none)))


def test_no_rows_are_no_launch(machine: Machine) -> None:
    spec = EmbedSpec(CPU, GGMLType.Q8_0, 64)
    raw, none = torch.zeros(3, 68, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    with machine.started():
        x, (cos, sin) = embed_cuda.bind(spec).rows_and_angles(raw, none, none, torch.ones(8), 1.0)
    assert x.shape == (0, 64) and cos.shape == sin.shape == (0, 1, 8)


@ON_CARD
@pytest.mark.parametrize("factor", [1.0, 4.0, 2.5])
@pytest.mark.parametrize("n", [1, 32, 64])
def test_angles_have_torch_s_bits(machine: Machine, n: int, factor: float) -> None:
    """Stored texts hang on them."""
    spec, gen = AnglesSpec(machine.device), torch.Generator().manual_seed(n)
    assert angles_cuda.check(angles_cuda.bind(spec), angles_ref.angles, spec) is None
    positions, freq = (
        angles_cuda.hostile(5000, gen).to(machine.device),
        angles_cuda.frequencies(n, machine.device),
    )
    for got, want in zip(
        angles_cuda.bind(spec)(positions, freq, factor),
        angles_ref.angles(positions, freq, factor),
        strict=True,
    ):
        assert torch.equal(got, want)


@ON_CARD
def test_a_table_of_many_bytes_is_read_at_its_end(machine: Machine) -> None:
    spec, n_token = EmbedSpec(machine.device, GGMLType.Q8_0, 8192), 300_000
    raw = torch.zeros(n_token, 8704, dtype=torch.uint8, device=machine.device)  # 2.6e9 bytes
    raw[-1] = embed_cuda.any_bytes(spec.type, 8192, 1, torch.Generator().manual_seed(1))[0].to(
        machine.device
    )
    tokens = torch.tensor([n_token - 1, 0], device=machine.device)
    got, want = (e.rows(raw, tokens) for e in (embed_cuda.bind(spec), TorchEmbed(spec)))
    assert torch.equal(embed_cuda.bits(got), embed_cuda.bits(want)) and bool(got[0].any())


@ON_CARD
def test_graphs_replay_it_on_new_tokens(machine: Machine) -> None:
    spec, gen = EmbedSpec(machine.device, GGMLType.Q4_K, 5120), torch.Generator().manual_seed(2)
    raw, own = embed_cuda.any_bytes(spec.type, 5120, 500, gen).to(machine.device), embed_cuda.bind(spec)
    tokens, positions = (torch.zeros(6, dtype=torch.int64, device=machine.device) for _ in range(2))
    freq = angles_cuda.frequencies(32, machine.device)
    replay, (x, (cos, sin)) = machine.captured(
        lambda: own.rows_and_angles(raw, tokens, positions, freq, 1.0)
    )
    for _ in range(20):
        tokens.copy_(torch.randint(0, 500, (6,), generator=gen))
        positions.copy_(torch.randint(0, 1 << 17, (6,), generator=gen))
        replay()
        want, (cos_want, sin_want) = TorchEmbed(spec).rows_and_angles(raw, tokens, positions, freq, 1.0)
        assert torch.equal(embed_cuda.bits(x), embed_cuda.bits(want))
        assert torch.equal(cos, cos_want) and torch.equal(sin, sin_want)


@ON_CARD
def test_a_fault_is_read_once(machine: Machine) -> None:
    raw = torch.ones(9, 128, dtype=torch.uint8, device=machine.device)
    embed_cuda.bind(EmbedSpec(machine.device, GGMLType.F16, 64)).rows(
        raw, torch.tensor([3, 9, 8], device=machine.device)
    )
    fault = faults.read(machine.device)
    assert fault is not None and (fault.op, fault.place, fault.index, fault.limit) == ("embed", 1, 9, 9)
    assert faults.read(machine.device) is None
