"""moe_few.cu, thread by thread on the CPU: few rows find each other's experts, and CTAs go from one unit of work to the next."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from test_emulated_moe import SHAPES, exact, packed, spread, worst

from pyspec.cuda.kernels import moe_cuda
from pyspec.cuda.kernels.moe_ref import Added, MoeSpec
from pyspec.gguf import GGMLType

pytestmark = needs_compiler
Q8_0 = GGMLType.Q8_0

CROWDS = (moe_cuda.Build(1, 4, 3, 1, 1), moe_cuda.Build(1, 8, 3, 32, 2))
"""More rows than is worth it: many items and units for a CTA."""


def test_few_rows_find_those_that_took_the_same_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """As lists do: 704 pairs, crowds of up to 32 at an expert, ids that are no expert's, all orders of CTAs."""
    monkeypatch.setattr(moe_cuda, "FEWS", CROWDS)
    spec = MoeSpec(CPU, 22, 64, 32, "relu2", Q8_0, Q8_0, pieces=2)
    stacks, x = packed(spec, 30), torch.randn(33, 64, generator=torch.Generator().manual_seed(3))
    ids, weights = spread(33, 22, 30)
    ids[:, 0], ids[4, 3], ids[30, 1] = 7, -1, 1000
    found = []
    for seed, n_row in ((0, 33), (1, 32), (2, 31), (3, 9)):
        with emulated_gpu(seed=seed):
            found.append(moe_cuda.bind(spec)(stacks)(x[:n_row], ids[:n_row], weights[:n_row]))
    for other in found[1:]:
        assert torch.equal(other, found[0][: len(other)])
    assert worst(found[0].double(), exact(stacks)(x, ids.clamp(0, 29), weights)) < 1e-4


CHOICES = {
    "same": lambda n_row: torch.arange(3).expand(n_row, 3),  # the same experts for all
    "others": lambda n_row: torch.arange(3 * n_row).view(n_row, 3),  # an expert has one row at most
    "some": lambda n_row: torch.tensor([[0, 1, 2], [2, 7, 0], [9, 2, 4], [5, 0, 11]])[:n_row],
    # ids that are no expert's: several of a row's pairs meet at the first and at the last one
    "no experts": lambda n_row: torch.tensor([[0, -1, 99], [-5, 99, 12], [98, 97, 96], [-1, -2, -3]])[:n_row],
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["units", "long", "records", "scaled"])
def test_few_rows_have_the_bits_of_many(name: str, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CTAs with one unit, with none and with many; all orders; items of 4 pairs and of 8."""
    spec = replace(SHAPES.get(name) or MoeSpec(CPU, 3, 288, 160, "swiglu", Q8_0, Q8_0, pieces=2), n_used=3)
    stacks, x = packed(spec, 13), torch.randn(9, spec.n_in, generator=torch.Generator().manual_seed(4))
    ids = torch.cat((CHOICES[choice](4), torch.rand(5, 13).argsort(-1)[:, :3])).int().contiguous()
    weights, residual, gate = torch.rand(9, 3), torch.randn(9, spec.n_in), torch.rand(9, 1)
    with emulated_gpu():
        want = moe_cuda.bind(spec)(stacks)(x, ids, weights, None, Added(residual, None, gate))
    for seed, (n_row, n_sm, build) in enumerate(
        (
            (1, 1, moe_cuda.FEWS[0]),
            (1, 40, moe_cuda.FEWS[0]),
            (2, 2, moe_cuda.FEWS[1]),
            (3, 1, moe_cuda.Build(1, 8, 3, 8, 1)),
            (4, 1, moe_cuda.FEWS[1]),
            (4, 9, moe_cuda.FEWS[1]),
            (4, 1000, moe_cuda.FEWS[1]),
        )
    ):
        part = slice(0, n_row)
        monkeypatch.setattr(moe_cuda, "FEWS", (build,))
        with emulated_gpu(n_multiprocessor=n_sm, seed=seed):
            run = moe_cuda.bind(spec)(stacks)
            got = run(x[part], ids[part], weights[part], None, Added(residual, None, gate).part(part))
        assert torch.equal(got, want[part]) and not run.down.tickets.any()
        monkeypatch.undo()


def test_tickets_are_back_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_cuda, "FEWS", CROWDS)
    spec = MoeSpec(CPU, 3, 64, 96, "swiglu", Q8_0, Q8_0, pieces=1)
    stacks, (ids, weights) = packed(spec, 6), spread(20, 3, 6)
    with emulated_gpu(seed=5):
        run = moe_cuda.bind(spec)(stacks)
        first, again = (run(torch.ones(20, 64), ids, weights) for _ in "ab")
        assert torch.equal(first, again) and not run.down.tickets.any()
