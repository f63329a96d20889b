"""`embed` and `angles`: plain torch, their checks, and their kernels on every machine and for every architecture."""

from __future__ import annotations

import math

import pytest
import torch
from machines import CPU, NO_FAULT, ON_CARD, Machine, cases, compiled
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.jit import ARCHS
from pyspec.cuda.op import FaultPlace
from pyspec.cuda.ops.angles import cuda as angles_cuda
from pyspec.cuda.ops.angles import ref as angles_ref
from pyspec.cuda.ops.angles.op import angles
from pyspec.cuda.ops.angles.ref import AnglesSpec
from pyspec.cuda.ops.angles.ref import angles as torch_angles
from pyspec.cuda.ops.embed import cuda as embed_cuda
from pyspec.cuda.ops.embed.op import embed
from pyspec.cuda.ops.embed.ref import EmbedSpec, TorchEmbed
from pyspec.cuda.ops.linear.dequant import dequantize
from pyspec.gguf import GGMLType

GPU = torch.device("cuda", 0)
pytestmark = pytest.mark.sampled(1)


@pytest.mark.parametrize("type", [*embed_cuda.TYPES, GGMLType.Q3_K, GGMLType.NVFP4])
def test_rows_are_those_of_the_whole_matrix(type: GGMLType) -> None:
    spec, gen = EmbedSpec(CPU, type, 512), torch.Generator().manual_seed(int(type))
    raw, tokens = embed_cuda.any_bytes(type, 512, 9, gen), torch.tensor([8, 0, 3, 3])
    own = embed.reference.bind(spec)
    assert isinstance(own, TorchEmbed) and embed.chosen(spec).capturable
    want = dequantize(raw, type, (9, 512))[tokens]
    assert torch.equal(embed_cuda.bits(own.rows(raw, tokens)), embed_cuda.bits(want))
    positions, freq = torch.arange(4), angles_cuda.frequencies(5, CPU)
    x, both = own.rows_and_angles(raw, tokens, positions, freq, 1.0)
    assert torch.equal(embed_cuda.bits(x), embed_cuda.bits(want))
    assert all(torch.equal(a, b) for a, b in zip(both, torch_angles(positions, freq, 1.0), strict=True))


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_angles_are_those_of_positions_over_the_factor(factor: float) -> None:
    assert angles.chosen(AnglesSpec(CPU)).capturable
    positions, freq = torch.tensor([0, 3, 1000]), torch.tensor([1.0, 0.25])
    cos, sin = torch_angles(positions, freq, factor)
    for i, p in enumerate(positions.tolist()):
        for j, f in enumerate(freq.tolist()):
            assert abs(cos[i, 0, j] - math.cos(p / factor * f)) < 1e-6
            assert abs(sin[i, 0, j] - math.sin(p / factor * f)) < 1e-6
    assert [x.shape for x in torch_angles(positions, freq[:0], factor)] == [(3, 1, 0)] * 2


class Wrong(TorchEmbed):
    """Rows or angles that are a little off."""

    def __init__(self, spec: EmbedSpec, how: str) -> None:
        super().__init__(spec)
        self.how = how

    def rows(self, raw: Tensor, tokens: Tensor) -> Tensor:
        x = super().rows(raw, tokens)
        if self.how == "a bit":
            x[-1, -1] = torch.nextafter(x[-1, -1].nan_to_num(1.0), torch.tensor(9.0))
        if self.how == "last token":
            x[tokens == embed_cuda.N_TOKEN - 1] = super().rows(raw, tokens[-1:] - 1)
        return x

    def rows_and_angles(
        self, raw: Tensor, tokens: Tensor, positions: Tensor, freq: Tensor, factor: float
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        cos, sin = torch_angles(positions, freq * (1 + 1e-7) if self.how == "angles" else freq, factor)
        return self.rows(raw, tokens), (cos, sin)


@pytest.mark.parametrize(
    ("how", "said"),
    [("", None), ("a bit", "are not the reference's"), ("last token", "are not"), ("angles", "angles")],
)
def test_the_check_finds_what_is_wrong(how: str, said: str | None) -> None:
    spec = EmbedSpec(CPU, GGMLType.F16, 64)
    found = embed_cuda.check(Wrong(spec, how), TorchEmbed(spec), spec)
    assert found is None if said is None else said in (found or "")


def test_angles_that_are_less_exact_are_refused() -> None:
    spec = AnglesSpec(CPU)

    def short(positions: Tensor, freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        theta = (positions[:, None].float() / factor * freq).half().float()
        return theta.cos()[:, None], theta.sin()[:, None]

    assert angles_cuda.check(torch_angles, torch_angles, spec) is None
    assert "cos of" in (angles_cuda.check(short, torch_angles, spec) or "")


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
    raw, tokens = embed_cuda.any_bytes(spec.type, 8, 4, gen), torch.tensor([1, 3])
    positions = torch.tensor([77, 5])
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
        assert machine.faults().tolist() == [1, embed_cuda.GUARD.number, 1, seen, 7]
        machine.faults().zero_()
    assert faults.fault_of(embed_cuda.GUARD.number, 0, 0, 0).names is FaultPlace.ROW
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
    positions = angles_cuda.hostile(5000, gen).to(machine.device)
    freq = angles_cuda.frequencies(n, machine.device)
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


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_embeddings_compile_for_every_architecture(arch: str) -> None:
    for type in embed_cuda.TYPES:
        found = compiled("embed", arch, embed_cuda.FILE.defines(type))["embed"]
        assert found.registers <= 64, (type, found)
    compiled("angles", arch)
