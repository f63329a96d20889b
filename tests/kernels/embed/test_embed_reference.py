"""`embed` and `angles` in plain torch, and their checks, which reject wrong ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pyspec.cuda.ops.angles import cuda as angles_cuda
from pyspec.cuda.ops.angles.op import angles
from pyspec.cuda.ops.angles.ref import AnglesSpec
from pyspec.cuda.ops.angles.ref import angles as torch_angles
from pyspec.cuda.ops.embed import cuda as embed_cuda
from pyspec.cuda.ops.embed.op import embed
from pyspec.cuda.ops.embed.ref import EmbedSpec, TorchEmbed
from pyspec.cuda.ops.linear.dequant import dequantize
from pyspec.gguf import GGMLType

CPU = torch.device("cpu")


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
