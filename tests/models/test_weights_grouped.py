"""Products of an input's parts, and activations that are cut, in the ways that few and many rows take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pyspec import synth
from pyspec.cuda.ops.linear.dequant import dequantize
from pyspec.cuda.packed_cpu import CpuGroups
from pyspec.gguf import open_gguf
from pyspec.models.grouped import Grouped
from pyspec.models.matrices import CutGates, Dense
from pyspec.models.weight_bytes import weight_bytes
from pyspec.models.weights import Weights


@pytest.mark.parametrize("n_row", [1, 3, 16, 17])
def test_parts_as_rows_of_their_own_give_what_groups_give(n_row: int) -> None:
    gen = torch.Generator().manual_seed(n_row)
    weight, x = torch.randn(4, 5, 6, generator=gen), torch.randn(n_row, 24, generator=gen)
    asked: list[int] = []

    def few(parts: torch.Tensor, *_: object) -> torch.Tensor:
        asked.append(len(parts))
        return F.linear(parts, weight.flatten(0, 1))

    got = Grouped(weight, few)(x)
    want = torch.cat([F.linear(x[:, 6 * g : 6 * g + 6], weight[g]) for g in range(4)], -1)
    assert torch.allclose(got, want, atol=1e-6) and torch.allclose(Grouped(weight)(x), want, atol=1e-6)
    assert asked == ([4 * n_row] if n_row <= 16 else []) and got.is_contiguous()


def test_gates_are_cut_from_above_and_ups_on_both_sides() -> None:
    weight = torch.eye(4)  # two gates, two ups
    x = torch.tensor([[9.0, -9.0, 9.0, -9.0], [0.5, 0.25, 0.5, -0.5]])
    silu = F.silu(torch.tensor([1.0, -9.0])), F.silu(torch.tensor([0.5, 0.25]))
    want = torch.stack((silu[0] * torch.tensor([1.0, -1.0]), silu[1] * torch.tensor([0.5, -0.5])))
    assert torch.equal(CutGates(Dense(weight), 1.0)(x), want)


@pytest.mark.parametrize("quant", ["f16", "q8_0", "bf16"])
def test_on_a_cpu_groups_are_multiplied_from_the_bytes_of_the_file(quant: str, tmp_path: Path) -> None:
    """In bf16 their outputs were rounded to 8 bits, so that one row and many differed by 0.2 in a logit."""
    file = open_gguf(synth.write("deepseek4", tmp_path / "m.gguf", quant=quant, tiny=True))
    info = file.tensors[name := "blk.0.attn_output_a.weight"]
    whole = dequantize(torch.from_numpy(file.raw(name)), info.type, info.shape)
    product = Weights(file, torch.device("cpu"), None).grouped(name, 2)
    x = torch.randn(19, 2 * info.shape[1], generator=torch.Generator().manual_seed(1))
    want = torch.einsum("rgi,goi->rgo", x.view(19, 2, -1), whole.view(2, -1, info.shape[1])).flatten(1)
    got = product(x)
    assert isinstance(product, CpuGroups) and (got - want).norm() < 1e-4 * want.norm()
    assert torch.equal(torch.cat([product(row[None]) for row in x]), got)
    assert weight_bytes(file, None) == sum(
        t.n_bytes if len(t.shape) > 1 else 4 * t.n_elements for t in file.tensors.values()
    )
