"""An op's order of implementations: limits first, then the check, the reference last; asked once per spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module

import pytest
import torch

from pyspec.cuda import op as ops
from pyspec.cuda.op import Impl, Op, all_ops, device_of, run_by_torch


@dataclass(frozen=True)
class Spec:
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    n: int = 1


def impl(name: str, **options: object) -> Impl[Spec, Callable[[], str]]:
    return Impl(name, lambda spec: lambda: name, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "why"),
    [
        ((7, 5), "made for compute capability 8.0 to 12.1, this GPU has 7.5"),
        ((8, 0), None),
        ((9, 0), None),
        ((12, 1), None),
        ((13, 0), "made for compute capability 8.0 to 12.1, this GPU has 13.0"),
    ],
)
def test_a_gpu_outside_the_range_is_refused(
    capability: tuple[int, int], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    op = Op("x", impl("torch"), [impl("cuda")])
    assert op.refusal(op.impls[0], Spec(torch.device("cuda", 0))) == why
    assert op.refusal(op.impls[0], Spec()) is None, "a CPU has no capability"


def test_a_narrower_range_is_the_implementation_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    op = Op("x", impl("torch"), [impl("hopper", capabilities=((9, 0), (9, 0))), impl("cuda")])
    spec = Spec(torch.device("cuda", 0))
    assert op.chosen(spec).name == "cuda"
    assert next(iter(op.choices(spec))) == ("hopper", "made for compute capability 9.0 to 9.0, this GPU has 10.0")  # fmt: skip


def test_limits_are_asked_before_anything_is_bound() -> None:
    def never(spec: Spec) -> object:
        raise AssertionError("bound outside its limits")

    picky = Impl("picky", never, lambda spec: None if spec.n > 3 else "takes more than 3")  # type: ignore[arg-type]
    op = Op("x", impl("torch"), [picky], check=lambda launch, reference, spec: None)
    assert op.bind(Spec(n=3))() == "torch"
    assert dict(op.choices(Spec(n=3))) == {"picky": "takes more than 3", "torch": None}
    assert "AssertionError: bound outside its limits" in (op.refusal(picky, Spec(n=4)) or "")


def test_a_spec_is_decided_once_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    n = 0

    def check(launch: object, reference: object, spec: Spec) -> str:
        nonlocal n
        n += 1
        return "it is off by one"

    op = Op("x", impl("torch"), [impl("bad")], check)
    with caplog.at_level("INFO", "pyspec.cuda.op"):
        for _ in range(3):
            assert op.chosen(Spec()).name == "torch"
        assert op.chosen(Spec(n=2)).name == "torch"
    assert n == 2
    assert [r.getMessage() for r in caplog.records] == ["x runs as torch (bad: it is off by one)"]


def test_what_keeps_rounds_from_graphs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Impl("cuda", impl("cuda").bind, lambda spec: "it is off by one")
    lane = Impl("lane", bad.bind, lambda spec: "nothing is away")
    held, kept, good = (
        Op("held", impl("torch", capturable=True), [bad]),
        Op("kept", impl("torch"), [lane, bad]),
        Op("good", impl("torch"), [impl("cuda", capturable=True)]),
    )
    monkeypatch.setattr(ops, "all_ops", lambda: [held, kept, good])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kept.bind(Spec())
    assert run_by_torch() == "the sums of ranks", "of a CPU's ops none is in a graph"
    for op in (held, kept, good):
        op.bind(Spec(torch.device("cuda", 0)))
    kept.bind(Spec(torch.device("cuda", 0), n=2))
    assert run_by_torch() == "kept (lane: nothing is away; cuda: it is off by one)"


def test_the_reference_is_never_refused() -> None:
    def broken(spec: Spec) -> object:
        raise RuntimeError("even this")

    op = Op("x", Impl("torch", broken), [])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="even this"):
        op.bind(Spec())


def test_a_spec_without_a_device_is_the_cpu_s() -> None:
    assert device_of("anything") == torch.device("cpu") == device_of(Spec())


def test_a_child_process_finds_every_op_at_its_home() -> None:
    for op in all_ops():
        module, _, name = op.home.partition(":")
        assert getattr(import_module(module), name) is op, f"{op.name} is not at {op.home}"
