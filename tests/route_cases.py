"""Routers that choose experts in groups, and scores that tie, for the tests of every tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pyspec.cuda.ops.moe.ref import Route, Router, RouteSpec, bind_route

CPU = torch.device("cpu")


def grouped(
    sizes: tuple[int, int, int, int], router: Router = "sigmoid", n_in: int = 64, **more: object
) -> RouteSpec:
    """sizes: experts, groups, groups that are kept, experts of a row."""
    n_expert, n_group, n_kept, n_used = sizes
    return RouteSpec(
        CPU,
        n_in,
        n_expert,
        n_used,
        router,
        n_group=n_group,
        n_group_used=n_kept,
        **more,  # type: ignore[arg-type]
    )


GROUPED = {
    "DeepSeek-V3": grouped((256, 8, 4, 8), scale=2.5, biased=True),
    "groups over two warps": grouped((60, 5, 2, 7), scale=1.5, biased=True),
    "odd sizes": grouped((9, 3, 1, 3), "softmax"),
    "groups of one": grouped((7, 7, 3, 3), biased=True),
    "groups of two": grouped((34, 17, 5, 9), renorm=False),
    "groups of more than a warp": grouped((300, 3, 2, 22), "sqrtsoftplus", biased=True),
    "all are kept": grouped((6, 3, 3, 4), "softmax", biased=True, gated=True),
    "a group that is used whole": grouped((40, 5, 1, 8), biased=True, gated=True),
}


FACTORED = {
    "one of many": RouteSpec(CPU, 32, 33, 1, biased=True, factored=True),
    "all": RouteSpec(CPU, 32, 6, 6, renorm=False, factored=True),
    "gated": RouteSpec(CPU, 64, 40, 8, gated=True, factored=True),
    "scaled": RouteSpec(CPU, 96, 70, 22, "sigmoid", scale=5.0, biased=True, factored=True),
    "given": RouteSpec(CPU, 64, 40, 6, "sqrtsoftplus", scale=1.5, given=True, factored=True),
    "shifted": RouteSpec(CPU, 96, 32, 4, "chosen", False, shifted=True, factored=True),
    "grouped": grouped((40, 5, 1, 8), biased=True, gated=True, factored=True),
}


def factors_multiply_weights(bind: Callable[[RouteSpec], Route], spec: RouteSpec, n_row: int) -> None:
    """Weights are those without factors times these, to the bit, and the reference's: factors of zero, below it, tiny and huge."""
    gen, n = torch.Generator().manual_seed(n_row), spec.n_expert
    matrix = torch.randn(n + spec.gated, spec.n_in, generator=gen)
    own = torch.randn(n_row, spec.n_in, generator=gen), torch.ones(spec.n_in), matrix
    bias = torch.rand(n, generator=gen) if spec.biased else None
    given = torch.randint(0, n, (n_row, spec.n_used), generator=gen).int() if spec.given else None
    beside = {"shift": torch.randn(n, generator=gen)} if spec.shifted else {}
    factors = torch.tensor([0.0, -1.5, 1e-30, 1e30, -3e-20]).repeat(-(-n // 5))[:n]
    args = *own, bias, given
    plain = bind(replace(spec, factored=False))(*args, **beside)
    got, want = (each(spec)(*args, **beside, factors=factors) for each in (bind, bind_route))
    assert torch.equal(got.ids, plain.ids) and torch.equal(
        got.weights, plain.weights * factors[got.ids.long()]
    )
    is_same = got.ids == want.ids
    assert float(is_same.float().mean()) > 0.99
    assert torch.allclose(got.weights[is_same], want.weights[is_same], rtol=1e-4, atol=0.0)
    assert got.gate is None or plain.gate is None or torch.equal(got.gate, plain.gate)


def ties_of_groups(spec: RouteSpec) -> tuple[Tensor, Tensor | None]:
    """Logits [8, n_expert] and a bias [n_expert] or None with few values, whose sums of two are equal only where both are."""
    gen = torch.Generator().manual_seed(spec.n_expert)
    level = torch.randint(-1, 1, (8, spec.n_expert), generator=gen).float()
    bias = torch.randint(0, 2, (spec.n_expert,), generator=gen).float()
    level = torch.where(bias > 0, torch.tensor(2.0), level)
    level[0], level[1], level[2] = 0.0, 2.0, -1.0
    return level, bias if spec.biased else None


def ties_of_products(spec: RouteSpec) -> tuple[RouteSpec, tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """The same from the products of rows with a unit matrix: a spec as wide as its experts, and its call's x, norm, matrix, bias."""
    logits, bias = ties_of_groups(spec)
    n_in = -(-spec.n_expert // 8) * 8
    x = torch.zeros(len(logits), n_in)
    x[:, : spec.n_expert] = logits
    matrix = torch.eye(spec.n_expert + spec.gated, n_in)
    return replace(spec, n_in=n_in), (x, torch.ones(n_in), matrix, bias)
