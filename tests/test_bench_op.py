"""tools/bench_op.py times the calls of an op's own check."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyspec.cuda.op import Impl, Op

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import bench_op

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Spec:
    device: torch.device = CPU


@dataclass(frozen=True)
class Matrix:
    data: Tensor


def twice(spec: Spec) -> Any:
    return lambda x, matrix: 2 * x


def wrong(spec: Spec) -> Any:
    return lambda x, matrix: x


def check(launch: Any, reference: Any, spec: Spec) -> str | None:
    matrix = Matrix(torch.ones(10))
    found = [
        torch.equal(launch(torch.ones(n), matrix), reference(torch.ones(n), matrix)) for n in (1, 3)
    ]
    return None if all(found) else "is not twice as much"


def test_every_call_of_a_check_is_recorded_with_its_bytes() -> None:
    op = Op("twice", Impl("torch", twice), [Impl("cuda", twice)], check)
    calls, why = bench_op.recorded(op, op.impls[0], Spec())
    assert why is None and [call.n_byte for call in calls] == [4 * (1 + 10 + 1), 4 * (3 + 10 + 3)]
    assert str(calls[1]) == "call(3 10 3)" and torch.equal(calls[1].run(), 2 * torch.ones(3))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_wrong_implementation_is_named_and_right_ones_are_timed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    op = Op("twice", Impl("torch", twice), [Impl("bad", wrong), Impl("good", twice)], check)
    args = Namespace(impl=[], cold=True, check=True, kernels=False)
    assert bench_op.bench(op, Spec(), args, CPU)
    out = capsys.readouterr().out
    assert (
        "bad: is not twice as much" in out and "good     call(3 10 3)" in out and "torch: right" in out
    )
