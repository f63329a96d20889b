"""Routers that choose experts in groups, and scores that tie, for the tests of every tier."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pyspec.cuda.ops.moe.ref import Router, RouteSpec

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
