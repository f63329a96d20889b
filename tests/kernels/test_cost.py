"""The price of a step down is measured on the calls of an op's own check, for the tier that would be next."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from pyspec.cuda import survey
from pyspec.cuda.op import Impl, Op

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Spec:
    device: torch.device = CPU


def taking(clock: list[float], seconds: float) -> Callable[[Spec], Callable[[Tensor], Tensor]]:
    """A launch that takes so long by a clock that does not run by itself."""

    def launch(x: Tensor) -> Tensor:
        clock[0] += seconds * len(x)
        return 2 * x

    return lambda spec: launch


def check(launch: Any, reference: Any, spec: Spec) -> str | None:
    for n in (1, 3):
        x = torch.ones(n)
        if not torch.equal(launch(x), reference(x)):
            return "is not twice as much"
    return None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_the_next_tiers_time_is_held_against_the_chosen_ones(clock: list[float]) -> None:
    tiers = [Impl(name, taking(clock, s)) for name, s in (("cuda", 1e-4), ("triton", 3e-4))]
    op = Op("twice", Impl("torch", taking(clock, 9e-4)), tiers, check)
    found = survey.step_down(op, Spec())
    assert found is not None and found.impl == "triton" and found.times == pytest.approx(3)


def test_a_tier_that_is_refused_is_not_the_next_one(clock: list[float]) -> None:
    def raising(spec: Spec) -> Any:
        raise RuntimeError("no")

    tiers = [Impl("cuda", taking(clock, 1e-4)), Impl("triton", raising)]
    found = survey.step_down(Op("twice", Impl("torch", taking(clock, 9e-4)), tiers, check), Spec())
    assert found is not None and found.impl == "torch" and found.times == pytest.approx(9)


def test_the_reference_has_nothing_below_it(clock: list[float]) -> None:
    op = Op("twice", Impl("torch", taking(clock, 1e-4)), [], check)
    assert survey.step_down(op, Spec()) is None
    assert survey.step_downs([(op, Spec())]) == [None]


def test_launches_that_give_launches_and_have_others_beside_them_are_noted() -> None:
    """As `moe`, which loads first; as `best`, which has two; and `linear`, which packs."""
    calls: list[Callable[[], object]] = []

    class Many:
        name = "many"

        def __call__(self, stacks: int) -> Callable[[Tensor], Tensor]:
            return lambda x: stacks * x

        def pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

        def pack(self, x: Tensor) -> Tensor:
            return x + 1

    noted = survey.Noted(Many(), calls)
    x = torch.ones(2)
    assert noted.name == "many" and getattr(noted, "nothing", None) is None
    assert torch.equal(noted(3)(x), 3 * x) and len(calls) == 1
    assert len(noted.pairs(x)) == 2 and len(calls) == 2
    assert torch.equal(noted.pack(x), x + 1) and len(calls) == 2
    assert torch.equal(calls[0](), 3 * x)  # type: ignore[arg-type]
