"""Norms in plain torch against their formulas in float64; and the check, which rejects wrong ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyspec.cuda.ops.norms import cuda as norms_cuda
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec, TorchNorms

CPU = torch.device("cpu")
SPEC = NormsSpec(CPU, 96, 1e-6)


def by_formula(x: Tensor, weight: Tensor, spec: NormsSpec) -> Tensor:
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if spec.layer else x
    return x / (x.square().mean(-1, keepdim=True) + spec.eps).sqrt() * weight.double()


@pytest.mark.parametrize("layer", [False, True])
def test_norms_are_what_their_formulas_say(layer: bool) -> None:
    spec, gen = NormsSpec(CPU, 96, 1e-6, layer), torch.Generator().manual_seed(1)
    own = norms.reference.bind(spec)
    assert isinstance(own, TorchNorms) and norms.chosen(spec).capturable
    a, b = (norms_cuda.rows_of(6, 96, gen) for _ in range(2))
    weights = torch.rand(2, 96, generator=gen)
    want = by_formula(a, weights[0], spec)
    assert torch.allclose(own(a, weights[0]).double(), want, rtol=1e-4, atol=1e-4)
    assert torch.equal(own.added(a, weights[0], b, 0.5), (b + own(a, weights[0])) * 0.5)
    rows = torch.tensor([5, 0, 5])
    everything, some = own.picked(a, weights[0], rows)
    assert torch.equal(everything, own(a, weights[0])) and torch.equal(some, everything[rows])
    both = torch.cat([everything, own(b, weights[1])], -1)
    assert torch.equal(own.paired(a, weights[0], b, weights[1]), both)


class Wrong(TorchNorms):
    def __init__(self, how: str) -> None:
        super().__init__(NormsSpec(CPU, 96, 1e-5 if how == "eps" else 1e-6, how == "layer"))
        self.how = how

    def added(self, x: Tensor, weight: Tensor, stream: Tensor, factor: float = 1.0) -> Tensor:
        return super().added(x, weight, stream, 1.0 if self.how == "factor" else factor)

    def picked(self, x: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        y, some = super().picked(x, weight, rows)
        return y, some if self.how != "rows" else super().picked(x, weight, rows.flip(0))[1]

    def paired(self, a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor) -> Tensor:
        y = super().paired(a, a_weight, b, a_weight if self.how == "weight" else b_weight)
        return y if self.how != "bits" else y * (1 + 2e-7)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("", None),
        ("eps", "first input differ"),
        ("layer", "first input differ"),
        ("weight", "second input differ"),
        ("bits", "other bits"),
        ("rows", "rows picked"),
        ("factor", "rows added to others differ"),
    ],
)
def test_the_check_finds_what_is_wrong(how: str, said: str | None) -> None:
    found = norms_cuda.check(Wrong(how), TorchNorms(SPEC), SPEC)
    assert found is None if said is None else said in (found or "")
