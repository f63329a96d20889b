"""The router's kernels run thread by thread on the CPU: scores, choices, rows normed on the way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from route_cases import FACTORED, GROUPED, factors_multiply_weights, ties_of_groups

from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe.ref import Routes, RouteSpec
from pyspec.cuda.ops.moe_route import cuda as moe_route_cuda
from pyspec.cuda.ops.rows import cuda as rows_cuda
from pyspec.models.stacks import AS_THEY_ARE

pytestmark = [needs_compiler, pytest.mark.sampled(1)]
ROUTES = {
    "qwen": RouteSpec(CPU, 96, 40, 8, gated=True),
    "nemotron": RouteSpec(CPU, 64, 70, 22, "sigmoid", scale=5.0, biased=True),
    "plain": RouteSpec(CPU, 32, 6, 6, renorm=False),
    "biased softmax": RouteSpec(CPU, 32, 33, 1, biased=True),
    "several warps": RouteSpec(CPU, 2080, 5, 2, gated=True, eps=1e-2),
    "deepseek4": RouteSpec(CPU, 64, 40, 6, "sqrtsoftplus", scale=1.5, biased=True),
    "deepseek4 by token": RouteSpec(CPU, 64, 40, 6, "sqrtsoftplus", scale=1.5, given=True),
    "softmax by token": RouteSpec(CPU, 64, 70, 3, gated=True, given=True),
    "gpt-oss": RouteSpec(CPU, 96, 32, 4, "chosen", False, shifted=True),
    "gpt-oss, gated": RouteSpec(CPU, 64, 70, 4, "chosen", False, scale=1.5, shifted=True, gated=True),
    "several whole warps": RouteSpec(CPU, 3072, 4, 2, "sigmoid"),
    "rows as they are": RouteSpec(CPU, 256, 40, 6, gated=True, eps=AS_THEY_ARE),
    **{name: replace(spec, n_in=96) for name, spec in GROUPED.items()},
    **{f"factors, {name}": spec for name, spec in FACTORED.items()},
}


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ROUTES)
def test_routes_are_the_references(kind: str) -> None:
    spec = ROUTES[kind]
    for seed in range(2):
        with emulated_gpu(seed=seed):
            assert (
                moe_route_cuda.check(moe_route_cuda.bind(spec), moe_ref.bind_route(spec), spec) is None
            )


def route_of(spec: RouteSpec, logits: torch.Tensor, bias: torch.Tensor | None = None) -> Routes:
    """Routes of given logits, which go around moe_scores."""
    n_row, n_thread = logits.shape[0], -(-spec.n_expert // 32) * 32
    ids = torch.full((n_row, spec.n_used), -1, dtype=torch.int32)
    weights = torch.full((n_row, spec.n_used), torch.nan)
    with emulated_gpu():
        _, choose = moe_route_cuda.FILE.kernels(CPU, spec)
        args = logits, logits if bias is None else bias, ids, weights, logits, logits, spec.scale
        choose.launch((n_row,), n_thread, args)
    return Routes(ids, weights)


def test_of_equal_logits_the_lower_index_is_chosen() -> None:
    logits = torch.tensor([[1.0, 2, 2, 0, 2, 2] + [0.0] * 34, [0.0] * 40, [-3.0] * 39 + [-2.0]])
    got = route_of(RouteSpec(CPU, 40, 40, 4), logits)
    assert got.ids.tolist() == [[1, 2, 4, 5], [0, 1, 2, 3], [39, 0, 1, 2]]


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("n_expert", [5, 32, 100, 256, 512])
@pytest.mark.parametrize("router", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("biased", [False, True])
def test_choices_are_the_references_whatever_the_logits_are_like(
    router: str, biased: bool, n_expert: int
) -> None:
    """Few values for many experts, zeros of both signs, all of one value, ascending and descending ones, far ones."""
    gen = torch.Generator().manual_seed(n_expert)
    logits = torch.randn(8, n_expert, generator=gen)
    logits[1] = torch.randint(0, 3, (n_expert,), generator=gen).float()
    logits[2] = 1.5
    logits[3] = torch.zeros(n_expert) * torch.where(logits[0] > 0, 1.0, -1.0)
    logits[4], logits[5] = logits[0].sort().values, logits[0].sort(descending=True).values
    logits[6] *= 40
    logits[7, n_expert // 2] = -torch.inf
    bias = torch.randint(0, 2, (n_expert,), generator=gen).float() if biased else None
    spec = RouteSpec(CPU, 4, n_expert, min(n_expert, 22), router, scale=2.5, biased=biased)  # type: ignore[arg-type]
    got, (ids, weights) = route_of(spec, logits, bias), moe_ref.choose(logits, spec, bias)
    assert torch.allclose(got.weights, weights, rtol=1e-5, atol=1e-7)
    p = moe_ref.probabilities(logits, spec.router)
    scores = logits if bias is None else p + bias
    differ = got.ids != ids  # a bias leaves few bits of a probability: a last one of it may decide
    off = (scores.gather(-1, got.ids.long()) - scores.gather(-1, ids.long())).abs()
    assert not differ.any() if bias is None else bool((off <= 3e-7).all())
    assert all(len(set(row)) == spec.n_used for row in got.ids.tolist())


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("name", GROUPED)
def test_of_groups_with_equal_sums_the_first_are_kept(name: str) -> None:
    spec = replace(GROUPED[name], gated=False)
    logits, bias = ties_of_groups(spec)
    got, (ids, weights) = route_of(spec, logits, bias), moe_ref.choose(logits, spec, bias)
    assert torch.equal(got.ids, ids)
    assert torch.allclose(got.weights, weights, rtol=1e-5, atol=1e-7)


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("name", GROUPED)
def test_logits_of_groups_that_are_no_numbers_choose_experts_that_exist(name: str) -> None:
    """A row of nothing else, infinities, a group of them; rows beside it have what they have without it."""
    spec = replace(GROUPED[name], gated=False)
    logits, bias = ties_of_groups(spec)
    clean = route_of(spec, logits, bias)
    n = spec.n_expert // spec.n_group
    logits[0], logits[1, ::2], logits[2, :n] = torch.nan, -torch.inf, torch.nan
    logits[3, -1] = torch.inf
    got = route_of(spec, logits, bias)
    assert ((got.ids >= 0) & (got.ids < spec.n_expert)).all()
    assert all(len(set(row)) == spec.n_used for row in got.ids.tolist())
    assert torch.equal(got.ids[4:], clean.ids[4:]) and torch.equal(got.weights[4:], clean.weights[4:])


@pytest.mark.parametrize("router", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_given_experts_are_weighed_and_not_chosen(router: str) -> None:
    """The worst ones, one that is named twice, logits far from zero; a number that names no expert is brought into range."""
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(3)) * torch.tensor(
        [[1.0], [30], [300], [0]]
    )
    given = logits.argsort(-1)[:, :3].int().contiguous()
    given[1] = 5
    given[3] = torch.tensor([-1, 40, 1 << 30])
    spec = RouteSpec(CPU, 4, 40, 3, router, scale=2.5, given=True)  # type: ignore[arg-type]
    got, (ids, weights) = (
        route_of(spec, logits, given),
        moe_ref.choose(logits, spec, None, given.clamp(0, 39)),
    )
    assert torch.equal(got.ids, ids) and torch.allclose(got.weights, weights, rtol=1e-5, atol=1e-7)


@pytest.mark.sampled(most=3)
@pytest.mark.parametrize("n_row", [1, 2, 33, 513])
@pytest.mark.parametrize("name", FACTORED)
def test_factors_of_outputs_multiply_weights_at_last(name: str, n_row: int) -> None:
    with emulated_gpu(seed=n_row):
        factors_multiply_weights(moe_route_cuda.bind, FACTORED[name], n_row)


@pytest.mark.slow
def test_logits_that_are_no_numbers_choose_experts_that_exist() -> None:
    logits = torch.zeros(5, 40)
    logits[0, 3], logits[1] = torch.nan, torch.nan
    logits[2] = -torch.inf
    logits[3, 7] = torch.inf
    logits[4, 2:] = torch.nan
    for spec in (
        RouteSpec(CPU, 40, 40, 5),
        RouteSpec(CPU, 40, 40, 5, "sigmoid", biased=True),
        RouteSpec(CPU, 40, 40, 5, biased=True),
        RouteSpec(CPU, 40, 40, 5, "sqrtsoftplus"),
    ):
        got = route_of(spec, logits, torch.zeros(40) if spec.biased else None)
        assert ((got.ids >= 0) & (got.ids < 40)).all()
        assert all(len(set(row)) == 5 for row in got.ids.tolist())
        if not spec.biased or spec.router == "sigmoid":
            last = [7, 0, 1, 2, 3]
            assert got.ids.tolist() == [
                [0, 1, 2, 4, 5],
                [0, 1, 2, 3, 4],
                [0, 1, 2, 3, 4],
                last,
                [0, 1, 2, 3, 4],
            ]


def test_of_all_experts_those_that_are_no_numbers_come_last() -> None:
    logits = torch.tensor([[torch.nan, -torch.inf, torch.nan, 1.0, -5.0, 2.0]])
    assert route_of(RouteSpec(CPU, 4, 6, 6), logits).ids.tolist() == [[5, 3, 4, 1, 0, 2]]


@pytest.mark.parametrize("kind", ["qwen", "long"])
def test_a_row_is_routed_with_the_same_bits_alone_and_among_others(kind: str) -> None:
    """In small CTAs and in large ones, with many rows in each."""
    spec = {"long": RouteSpec(CPU, 2080, 7, 2, gated=True)}.get(kind) or ROUTES[kind]
    gen = torch.Generator().manual_seed(6)
    x = torch.randn(37, spec.n_in, generator=gen)
    x[4] = torch.nan
    norm = torch.rand(spec.n_in, generator=gen)
    matrix = torch.randn(spec.n_expert + 1, spec.n_in, generator=gen)
    found = []
    for seed, rows in enumerate((slice(0, 37), slice(0, 9), slice(5, 6), slice(8, 9), slice(3, 20))):
        with emulated_gpu(seed=seed):
            got = moe_route_cuda.bind(spec)(x[rows], norm, matrix)
        found.append((rows, got))
    for rows, got in found[1:]:
        for one, all in zip(
            (got.ids, got.weights, got.gate), (t for t in vars_of(found[0][1])), strict=True
        ):
            assert torch.equal(one.nan_to_num(9.0), all[rows].nan_to_num(9.0))


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(
    ("n_in", "n_row", "power"), [(64, 3, 1.0), (2080, 19, 4.0), (2688, 5, 1.0), (3072, 17, 0.5)]
)
@pytest.mark.parametrize("layout", [rows_cuda.BLOCKED, rows_cuda.PLANES])
def test_the_routers_kernel_norms_rows_for_the_experts_on_the_way(
    n_in: int, n_row: int, power: float, layout: int
) -> None:
    """As rows.cu would, but for the order in which squares are added; columns up to whole blocks of 256 are zeros."""
    spec = RouteSpec(CPU, n_in, 6, 2, gated=True)
    gen = torch.Generator().manual_seed(7)
    x = torch.randn(n_row, n_in, generator=gen) * torch.logspace(-2, 2, n_row)[:, None]
    norm, matrix = 0.5 + torch.rand(n_in, generator=gen), torch.randn(7, n_in, generator=gen)
    found = []
    for seed, first in ((0, 0), (1, n_row - 1)):
        with emulated_gpu(seed=seed):
            rows = rows_cuda.RowsLaunch(CPU, n_in, (8, 16, 32), layout)
            rows.blocks.fill_(torch.nan)
            into = rows.room(n_row - first)
            routes = moe_route_cuda.bind(spec)(x[first:], norm, matrix, into=into, power=power)
            alone = moe_route_cuda.bind(spec)(x[first:], norm, matrix)
        assert torch.equal(routes.ids, alone.ids) and torch.equal(routes.weights, alone.weights)
        found.append([t.clone() for t in rows_cuda.values_of(into, n_in)])
        tail = rows_cuda.values_of(into, -(-n_in // 256) * 256)[0][:, n_in:]
        assert not tail.any()
        assert layout == rows_cuda.PLANES or bool((into.powers[: into.n_row] == power).all())
    values, sums = found[0]
    want = torch.nn.functional.rms_norm(x, (n_in,), norm, spec.eps)
    assert float(((values - want).abs() / want.abs().amax(1, keepdim=True)).amax()) < 2.0**-11
    assert torch.allclose(sums, values.view(n_row, -1, 32).sum(-1), atol=1e-3)
    assert torch.equal(found[1][0], values[-1:]) and torch.equal(found[1][1], sums[-1:])


def vars_of(r: Routes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return r.ids, r.weights, r.gate


def test_all_rows_and_scores_have_a_cta() -> None:
    for n_in, n_expert in ((64, 6), (2048, 256), (3072, 256), (4096, 512), (16384, 512)):
        spec = RouteSpec(CPU, n_in, n_expert, 2, gated=True)
        for n_row in (1, 2, 5, 8, 16, 17, 40, 512, 1000):
            for prepares in (False, True):
                g = moe_route_cuda.grid_of(spec, n_row, 132, prepares)
                group = 32 * -(-n_in // 1024)
                assert g.threads % group == 0 and 32 <= g.threads <= 512 and 1 <= g.per_cta <= 32
                assert g.scoring * (g.threads // group) * 2 >= n_expert + 1
                assert (g.preparing > 0) == prepares
                assert (g.ctas[1] - 1) * g.per_cta < n_row <= g.ctas[1] * g.per_cta
                assert not prepares or g.preparing * g.ctas[1] * (g.threads // group) >= n_row
                if n_row <= 32 and n_in < 4096:  # sizes of decoding: no CTA waits for a multiprocessor
                    assert g.ctas[0] * g.ctas[1] <= 132 * (512 // g.threads)
    wide = RouteSpec(CPU, 4096, 512, 2, gated=True)  # a line less would be half of them: some may wait
    assert (
        moe_route_cuda.grid_of(wide, 24, 132, True).ctas[1]
        == moe_route_cuda.grid_of(wide, 24, 132).ctas[1]
        == 2
    )
