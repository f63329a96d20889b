"""`moe_route` in C++: choices and weights of the reference, ties, rows beside others, recordings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from route_cases import FACTORED, GROUPED, factors_multiply_weights, ties_of_products

from pyspec.cpu import build
from pyspec.cpu.tape import Recorded, TapeMemory
from pyspec.cuda.ops.moe.ref import Router, Routes, RouteSpec, bind_route
from pyspec.cuda.ops.moe_route import cpu
from pyspec.cuda.ops.moe_route.cuda import check
from pyspec.cuda.ops.moe_route.op import moe_route

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
CPU = torch.device("cpu")
SPEC = RouteSpec(CPU, 72, 21, 5, biased=True, gated=True)


def run(spec: RouteSpec, x: torch.Tensor) -> Routes:
    gen = torch.Generator().manual_seed(1)
    matrix = torch.randn(spec.n_expert + spec.gated, spec.n_in, generator=gen)
    bias = torch.rand(spec.n_expert, generator=gen) if spec.biased else None
    return cpu.bind(spec)(x, torch.rand(spec.n_in, generator=gen), matrix, bias)


@pytest.mark.parametrize("router", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("sizes", [(8, 3, 3), (64, 9, 2), (72, 21, 21), (200, 130, 7)])
def test_it_is_the_reference(router: Router, sizes: tuple[int, int, int]) -> None:
    for i in range(8):
        n_in, n_expert, n_used = sizes
        spec = RouteSpec(CPU, n_in, n_expert, n_used, router, bool(i & 1), 2.5, bool(i & 2), bool(i & 4))
        assert cpu.limits(spec) is None and check(cpu.bind(spec), bind_route(spec), spec) is None
    given = replace(spec, given=True, biased=False, gated=False)
    assert check(cpu.bind(given), bind_route(given), given) is None
    assert moe_route.chosen(spec).name == "cpu"


@pytest.mark.parametrize("n_row", [1, 2, 33, 513])
@pytest.mark.parametrize("name", FACTORED)
def test_factors_of_outputs_multiply_weights_at_last(name: str, n_row: int) -> None:
    spec = FACTORED[name]
    factors_multiply_weights(cpu.bind, spec, n_row)
    assert check(cpu.bind(spec), bind_route(spec), spec) is None


def test_of_equal_scores_the_lower_expert_comes_first() -> None:
    matrix = torch.zeros(40, 16)
    matrix[[7, 31]] = 1.0
    ids = cpu.bind(RouteSpec(CPU, 16, 40, 5))(torch.ones(3, 16), torch.ones(16), matrix).ids
    assert ids.tolist() == [[7, 31, 0, 1, 2]] * 3


@pytest.mark.parametrize("name", GROUPED)
def test_groups_are_the_references(name: str) -> None:
    """Random rows, rows whose groups tie, and rows that are no numbers."""
    spec = GROUPED[name]
    assert moe_route.chosen(spec).name == "cpu"
    assert check(cpu.bind(spec), bind_route(spec), spec) is None
    given = replace(spec, given=True, biased=False)
    assert check(cpu.bind(given), bind_route(given), given) is None
    tied, (x, *call) = ties_of_products(spec)
    got, want = cpu.bind(tied)(x, *call), bind_route(tied)(x, *call)
    assert torch.equal(got.ids, want.ids) and torch.allclose(got.weights, want.weights, rtol=1e-5)
    x = x.clone()
    x[0], x[1, 0], x[2, 1], x[3, 0] = torch.nan, torch.nan, torch.inf, -torch.inf
    wild = cpu.bind(tied)(x, *call).ids
    assert torch.equal(wild[4:], got.ids[4:]) and bool(wild.sort(-1).values.diff(dim=-1).all())
    assert int(wild.min()) >= 0 and int(wild.max()) < spec.n_expert


def test_a_wrong_choice_among_groups_fails_the_check() -> None:
    """One that has no groups, or keeps one more of them."""
    spec = GROUPED["groups over two warps"]
    for wrong in (replace(spec, n_group=1, n_group_used=1), replace(spec, n_group_used=3)):
        assert "choose other experts" in (check(cpu.bind(wrong), bind_route(spec), spec) or "")


def test_rows_of_nan_choose_experts_that_exist_each_once() -> None:
    x = torch.randn(3, SPEC.n_in)
    x[1] = float("nan")
    ids = run(SPEC, x).ids
    assert ids[1].sort().values.diff().gt(0).all() and ids.min() >= 0 and ids.max() < SPEC.n_expert


def test_a_row_has_the_same_bits_beside_any_others_and_with_any_threads() -> None:
    x, before = torch.randn(300, 80)[:, 3 : 3 + SPEC.n_in], torch.get_num_threads()
    whole = run(SPEC, x)
    for n_thread in (1, 2, 3):
        torch.set_num_threads(n_thread)
        for first, n in ((0, 1), (17, 2), (30, 33), (255, 45)):
            own = run(SPEC, x[first : first + n])
            for name in ("ids", "weights", "gate"):
                assert torch.equal(getattr(own, name), getattr(whole, name)[first : first + n])
    torch.set_num_threads(before)


def test_a_recording_reads_its_rows_when_it_is_replayed() -> None:
    spec, x = replace(SPEC, biased=False), torch.randn(4, SPEC.n_in)
    launch, norm = cpu.bind(spec), torch.ones(spec.n_in)
    matrix = torch.randn(spec.n_expert + 1, spec.n_in)
    recorded = Recorded(lambda: launch(x, norm, matrix), TapeMemory())
    for _ in range(2):
        x.normal_()
        got, want = recorded.replay(), launch(x, norm, matrix)
        assert torch.equal(got.ids, want.ids) and torch.equal(got.weights, want.weights)


def test_limits_name_the_size() -> None:
    assert "12 wide" in (cpu.limits(replace(SPEC, n_in=12)) or "")
    assert "9 of 8 experts" in (cpu.limits(replace(SPEC, n_expert=8, n_used=9)) or "")
    assert "1025 experts" in (cpu.limits(replace(SPEC, n_expert=1025)) or "")
