"""The choice of experts in Triton against the reference, in the interpreter: routers, ties, rows that are no numbers, bits in company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton_interpreter  # noqa: F401
from route_cases import FACTORED, GROUPED, factors_multiply_weights, ties_of_products
from sampling import few

from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe.ref import Routes, RouteSpec
from pyspec.cuda.ops.moe_route import cuda as moe_route_cuda
from pyspec.cuda.ops.moe_route import triton as moe_route_triton

CPU = torch.device("cpu")
SPECS = {
    "softmax, gated": RouteSpec(CPU, 300, 40, 3, gated=True),
    "sigmoid, biased": RouteSpec(CPU, 256, 70, 5, "sigmoid", scale=5.0, biased=True),
    "softmax, biased, as they are": RouteSpec(CPU, 64, 9, 2, renorm=False, biased=True, eps=1e-5),
    "square roots": RouteSpec(CPU, 520, 16, 6, "sqrtsoftplus", scale=2.5, biased=True),
    "given": RouteSpec(CPU, 96, 33, 4, "sqrtsoftplus", given=True),
    "gpt-oss": RouteSpec(CPU, 96, 33, 4, "chosen", False, shifted=True),
    "all of them": RouteSpec(CPU, 32, 4, 4, gated=True),
    **GROUPED,
}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(
    "name", few(SPECS, "softmax, gated", "given", "gpt-oss", "groups over two warps")
)
def test_choices_and_weights_are_the_references(name: str) -> None:
    spec = SPECS[name]
    assert moe_route_cuda.check(moe_route_triton.bind(spec), moe_ref.bind_route(spec), spec) is None


def _run(spec: RouteSpec, x: torch.Tensor) -> Routes:
    gen = torch.Generator().manual_seed(0)
    matrix = torch.randn(spec.n_expert + spec.gated, spec.n_in, generator=gen)
    bias = torch.rand(spec.n_expert, generator=gen) if spec.biased else None
    return moe_route_triton.bind(spec)(x, torch.ones(spec.n_in), matrix, bias)


@pytest.mark.parametrize("n_row", few([1, 2, 33, 513], 1, 33))
@pytest.mark.parametrize("name", few(FACTORED, "one of many", "given"))
def test_factors_of_outputs_multiply_weights_at_last(name: str, n_row: int) -> None:
    factors_multiply_weights(moe_route_triton.bind, FACTORED[name], n_row)


@pytest.mark.parametrize("name", few(["softmax, gated", "sigmoid, biased"], "softmax, gated"))
def test_a_row_has_the_same_choice_to_the_bit_in_any_company(name: str) -> None:
    spec = SPECS[name]
    x = torch.randn(19, spec.n_in, generator=torch.Generator().manual_seed(1))
    whole = _run(spec, x)
    for part in (slice(0, 1), slice(5, 8), slice(2, 19)):
        got = _run(spec, x[part])
        assert torch.equal(got.ids, whole.ids[part]) and torch.equal(got.weights, whole.weights[part])
        assert whole.gate is None or got.gate is None or torch.equal(got.gate, whole.gate[part])


def test_rows_that_are_no_numbers_choose_experts_that_exist_and_harm_nobody() -> None:
    spec = SPECS["sigmoid, biased"]
    x = torch.randn(6, spec.n_in, generator=torch.Generator().manual_seed(2))
    clean = _run(spec, x)
    x[1], x[2, 5], x[4, 0] = torch.nan, torch.inf, 1e30
    got = _run(spec, x)
    assert torch.equal(got.ids[[0, 3, 5]], clean.ids[[0, 3, 5]])
    assert ((got.ids >= 0) & (got.ids < spec.n_expert)).all() and got.ids.sort(-1).values.diff(
        dim=-1
    ).all()


@pytest.mark.parametrize("name", few(GROUPED, "odd sizes", "groups of one", "groups of two"))
def test_of_groups_with_equal_sums_the_first_are_kept(name: str) -> None:
    spec, call = ties_of_products(GROUPED[name])
    got, want = moe_route_triton.bind(spec)(*call), moe_ref.bind_route(spec)(*call)
    assert torch.equal(got.ids, want.ids) and torch.allclose(got.weights, want.weights, rtol=1e-5)


@pytest.mark.parametrize("name", few(GROUPED, "odd sizes", "groups of one"))
def test_groups_that_are_no_numbers_choose_experts_that_exist_and_harm_nobody(name: str) -> None:
    spec, (x, *call) = ties_of_products(GROUPED[name])
    clean = moe_route_triton.bind(spec)(x, *call)
    x = x.clone()
    x[0], x[1, 0], x[2, 1], x[3, 0] = torch.nan, torch.nan, torch.inf, -torch.inf
    got = moe_route_triton.bind(spec)(x, *call)
    assert ((got.ids >= 0) & (got.ids < spec.n_expert)).all()
    assert got.ids.sort(-1).values.diff(dim=-1).all()
    assert torch.equal(got.ids[4:], clean.ids[4:]) and torch.equal(got.weights[4:], clean.weights[4:])


def test_given_experts_that_are_none_are_clamped() -> None:
    spec = SPECS["given"]
    given = torch.tensor([[-4, 1, 1 << 30, 32]], dtype=torch.int32)
    matrix = torch.randn(spec.n_expert, spec.n_in, generator=torch.Generator().manual_seed(0))
    got = moe_route_triton.bind(spec)(
        torch.ones(1, spec.n_in), torch.ones(spec.n_in), matrix, None, given
    )
    assert got.ids.tolist() == [[0, 1, 32, 32]] and got.weights.isfinite().all()
    assert not moe_route_triton.bind(spec)(
        torch.ones(0, spec.n_in), torch.ones(spec.n_in), matrix, None, given[:0]
    ).ids.numel()


def test_what_it_does_not_take_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert moe_route_triton.limits(SPECS["given"]) is None
    assert "2000" in (moe_route_triton.limits(replace(SPECS["given"], n_expert=2000)) or "")
    assert moe_route_triton.limits(SPECS["gpt-oss"]) is None
    assert "another choice" in (moe_route_triton.limits(replace(SPECS["gpt-oss"], biased=True)) or "")
    assert "65 of" in (moe_route_triton.limits(replace(SPECS["given"], n_used=65)) or "")
