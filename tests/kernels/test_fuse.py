"""Fusion depends on the abilities that launches declare: with them neighbours work together, without them each does its own part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.ops.attend import cuda as attend_cuda
from pyspec.cuda.ops.gdn import cuda as gdn_cuda
from pyspec.cuda.ops.mamba2 import cuda as mamba2_cuda
from pyspec.cuda.ops.moe import cuda as moe_cuda
from pyspec.cuda.ops.moe.loaded import LoadedExperts
from pyspec.cuda.ops.moe.ref import MoeSpec, Routes
from pyspec.cuda.ops.moe_route import cuda as moe_route_cuda
from pyspec.cuda.ops.norms import cuda as norms_cuda
from pyspec.cuda.ops.rows.ref import HeadNorm, Norm
from pyspec.cuda.streamed import Streamed

X = torch.ones(3, 4)
PREP = HeadNorm(torch.ones(4), 1e-6, torch.ones(3, 4))
NORM = Norm(torch.full((4,), 3.0), 1e-6)
SPEC = MoeSpec(torch.device("cpu"), 2, 4, 4, "swiglu", None, None)
ROUTES = Routes(torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2), None)


class Product(Streamed):
    """A streamed product that records its arguments; `few`: it takes rows that others prepared."""

    def __init__(self, few: bool) -> None:
        self.few, self.heard = few, []
        self.packed = SimpleNamespace(data=torch.zeros(7))  # type: ignore[assignment]

    def __call__(self, x: Any, prep: Any = None, residual: Tensor | None = None) -> Tensor:
        self.heard.append((x if isinstance(x, str) else "rows", prep))
        return X

    def place(self, n_row: int, prep: Any) -> Any:
        return f"place of {n_row}" if self.few else None

    def reads(self, n_row: int) -> Any:
        return f"rows of {n_row}"

    def most_ready(self, norm: Norm) -> int:
        return 3 if self.few else 2

    def sums_of(self, n_row: int) -> Any:
        return SimpleNamespace(summed=lambda shares: f"sums of {shares}") if self.few else None


def plain(x: Tensor, prep: Any = None, residual: Tensor | None = None) -> Tensor:
    return x


class Launch:
    fetches = True

    def __call__(self, x: Tensor) -> Tensor:
        return x[:, None]

    def prepared(self, x: Tensor, into: str) -> str:
        return f"prepared in {into}"


class Experts:
    def __init__(self, most: int = 512) -> None:
        self.most, self.heard = most, []

    def room(self, n_row: int) -> str | None:
        return "room" if n_row <= self.most else None

    def prepare(self, x: Tensor, prep: Any) -> str | None:
        return "prepared" if len(x) <= self.most else None

    def shares(self, ready: str, ids: Tensor, weights: Tensor, added: object = None) -> str:
        return f"shares of {ready}"

    def __call__(self, x: Tensor, *given: Any) -> Tensor:
        self.heard.append(given[-1])
        return x


def test_only_who_fetches_ahead_is_told_what_is_read_next() -> None:
    product = Product(few=True)
    assert fuse.read_next(Launch(), product)["after"] is product.packed.data
    assert fuse.read_next(Launch(), plain) == fuse.read_next(lambda x: x, product) == {}


@pytest.mark.parametrize("few", [True, False])
def test_a_launch_prepares_the_next_products_rows_where_both_can(few: bool) -> None:
    product = Product(few)
    fuse.then(Launch(), (X,), product, PREP, X)
    assert product.heard == [("prepared in place of 3", None) if few else ("rows", PREP)]
    assert fuse.writes_rows_of(Launch(), product)
    assert not fuse.writes_rows_of(lambda x: x[:, None], product)
    assert not fuse.writes_rows_of(Launch(), plain), "a library's product prepares by itself"


@pytest.mark.parametrize("few", [True, False])
def test_sums_of_experts_are_made_by_who_reads_them_where_it_can(few: bool) -> None:
    product, run = Product(few), Experts()
    experts = LoadedExperts(SPEC, run)  # type: ignore[arg-type]
    assert experts.sums_for(product) and not experts.sums_for(plain)
    experts.then(X, ROUTES, "ready", product, None)
    assert product.heard == [("sums of shares of ready" if few else "rows", None)]
    experts.then(X, ROUTES, None, product, None)
    assert product.heard[1] == ("rows", None) and run.heard == ([None] if few else ["ready", None])


@pytest.mark.parametrize("n_row", [0, 2, 3, 7])
def test_the_router_prepares_as_many_rows_as_experts_take(n_row: int) -> None:
    """Others sum squares in another order: a row's bits would depend on the number of rows."""
    heard, run = [], Experts(most=3)

    def route(x: Tensor, *given: Any, into: str, power: float, shift: str) -> Routes:
        heard.append((len(x), *given, into, power, shift))
        return ROUTES

    x, named = torch.arange(2.0 * n_row).view(n_row, 2), torch.arange(n_row)
    given = x, "norm", "matrix", None, named
    experts = LoadedExperts(SPEC, run)  # type: ignore[arg-type]
    assert torch.equal(experts.routed(x, NORM, None, (route, given, {"shift": "s"}), None), x)
    sizes = [3] * (n_row // 3) + ([n_row % 3] if n_row % 3 or not n_row else [])
    assert [own[0] for own in heard] == sizes and run.heard == ["room"] * len(sizes)
    assert all(own[1:4] == ("norm", "matrix", None) for own in heard)
    assert all(own[5:] == ("room", NORM.power, "s") for own in heard)
    assert torch.equal(torch.cat([own[4] for own in heard]), named)


def test_streams_sum_what_experts_made_of_few_rows_that_went_at_once() -> None:
    """The last part of many rows may be few: what it gave could not be joined with the others."""

    def route(x: Tensor, *given: Any, into: str, power: float) -> Routes:
        return ROUTES

    def made(x: Tensor, streams: Any, most: int = 512) -> Any:
        experts = LoadedExperts(SPEC, Experts(most))  # type: ignore[arg-type]
        experts.summed_by = streams
        return experts.routed(x, NORM, None, (route, (x, "norm", "matrix", None, None), {}), None)

    streams = SimpleNamespace(sums_of=lambda n_row: n_row <= 3)
    assert made(X, streams) == "shares of room"
    assert torch.equal(made(X, None), X)
    for n_row, most in ((4, 512), (5, 3)):
        x = torch.ones(n_row, 4)
        assert torch.equal(made(x, streams, most), x)


def test_rows_are_normed_before_experts_that_do_not_norm_them() -> None:
    run = Experts()
    experts = LoadedExperts(SPEC, run)  # type: ignore[arg-type]
    assert not experts.norms
    assert torch.equal(experts(X, NORM, None, ROUTES, None, None), NORM(X))


def test_states_are_folded_by_whose_launch_can() -> None:
    reference = lambda layer, slot, n_fold: None  # noqa: E731
    assert fuse.folder(lambda x: x, reference) is reference
    assert fuse.folder(SimpleNamespace(folder=lambda: "own"), reference) == "own"


class Norms:
    """Norms that say which way they were asked for."""

    def __init__(self, takes: bool = True) -> None:
        self.takes = lambda to: takes

    def added(self, *given: Any) -> str:
        return "added"

    def added_into(self, x: Tensor, weight: Tensor, stream: Tensor, factor: float, *to: Any) -> Any:
        return factor, *to


def test_norms_behind_a_part_prepare_what_is_read_next_where_both_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, given = Product(few=True), (X, X[0], X, 0.5)
    assert fuse.added(Norms(), *given, (few, NORM)) == (0.5, "rows of 3", NORM)  # type: ignore[arg-type, comparison-overlap]
    others = [
        (Norms(), None),
        (Norms(), (plain, NORM)),
        (Norms(), (Product(few=False), NORM)),
        (Norms(takes=False), (few, NORM)),
        (SimpleNamespace(added=Norms().added), (few, NORM)),
    ]
    assert [fuse.added(norms, *given, read) for norms, read in others] == ["added"] * 5  # type: ignore[arg-type]
    monkeypatch.setattr(fuse, "ADDS_INTO", 0)
    assert fuse.added(Norms(), *given, (few, NORM)) == "added"  # type: ignore[arg-type, comparison-overlap]


def test_our_kernels_say_what_models_rest_their_speed_on() -> None:
    """Were one of these names lost, models would be as right as before, and slower."""
    assert attend_cuda.AttendLaunch.fetches and mamba2_cuda.Mamba2Launch.fetches
    assert callable(gdn_cuda.GdnLaunch.prepared) and moe_route_cuda.RouteLaunch.writes_rows
    assert callable(norms_cuda.NormsLaunch.added_into) and callable(norms_cuda.NormsLaunch.takes)
    assert callable(gdn_cuda.GdnLaunch.folder) and callable(mamba2_cuda.Mamba2Launch.folder)
    assert all(callable(getattr(moe_cuda.ExpertsLaunch, name)) for name in ("room", "prepare", "shares"))
