"""Products of an input's parts, and activations that are cut, in the ways that few and many rows take."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pyspec.models.weights import CutGates, Dense, Grouped


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
