"""Survey of this machine for `pyspec doctor`: for each op and shape the chosen implementation, and why others are refused."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from pyspec.cuda import machine
from pyspec.cuda.op import Ask, Impl, Op, all_ops, device_of, listed_ops
from pyspec.slots.kv_types import KvFormat, name_of

REPEATS = 5
SHORTEST_S = 2e-4  # of one timing
UNTIMED = ("pack",)  # called by a load, not by rounds


@dataclass(frozen=True, slots=True)
class RefusedImpl:
    impl: str
    reason: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One op in one shape. `own`: the choice is not the torch reference."""

    op: str
    shape: str
    choice: str
    own: bool
    refused: tuple[RefusedImpl, ...]


def standard(device: torch.device) -> list[Ask]:
    """Every op in shapes that models have."""
    return [(op, spec) for op in listed_ops() for spec in op.shapes(device)]


def products(device: torch.device) -> list[Ask]:
    """Further shapes that a package's cubins are compiled for: matrices of every packed type with every epilogue."""
    return [(op, spec) for op in all_ops() for spec in op.more_shapes(device)]


def asked() -> list[Ask]:
    """Specs decided so far under this thread's tiers: after a load, all that the model and its drafter run with."""
    return [(op, spec) for op in listed_ops() for spec in op.decided]


def findings(asks: Iterable[Ask]) -> list[Finding]:
    """Have each checked, as a load does, and return the outcome."""
    out = []
    for op, spec in asks:
        chosen = op.chosen(spec)
        refused = []
        for name, why in op.choices(spec):
            if name == chosen.name:
                break
            refused.append(RefusedImpl(name, why or ""))
        out.append(
            Finding(op.name, shape_of(spec), chosen.name, chosen is not op.reference, tuple(refused))
        )
    return out


def shape_of(spec: Any) -> str:
    """A spec as text, without its device."""
    parts = []
    for field in dataclasses.fields(spec):
        if not field.repr:  # sizes of one engine, for which nothing is chosen
            continue
        value = getattr(spec, field.name)
        if isinstance(value, Enum):
            parts.append(value.name)
        elif isinstance(value, KvFormat):
            parts.append(f"{field.name} {value.name}")
        elif dataclasses.is_dataclass(value):
            parts.append(shape_of(value))
        elif isinstance(value, bool):
            parts += [field.name] * value
        elif isinstance(value, float):
            parts.append(f"{field.name} {value:.4g}")
        elif isinstance(value, torch.dtype):
            parts.append(f"{field.name} {name_of(value)}")
        elif not isinstance(value, torch.device):
            parts.append(f"{field.name} {value}")
    return ", ".join(parts)


# -- the price of a step down ------------------------------------------------------------------------------------------
#
# Each op's check is run twice, with the chosen implementation and with the next one, by a launch that notes its calls; the calls are then
# timed. They run in a graph where the implementation can be captured, as in a round; else one by one.


@dataclass(frozen=True, slots=True)
class StepDown:
    """`impl` would run instead of the chosen one. times: its time over the chosen one's, summed over all calls of a check."""

    impl: str
    times: float


class Noted:
    """A launch that remembers its calls, and those of a callable result."""

    def __init__(self, launch: Any, calls: list[Callable[[], object]]) -> None:
        self.launch, self.calls = launch, calls

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._call(self.launch, args, named)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.launch, name)
        if not callable(found) or name in UNTIMED:
            return found
        return lambda *args, **named: self._call(found, args, named)

    def _call(self, run: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        found = run(*args, **named)
        if callable(found) and not isinstance(found, Tensor):
            return Noted(found, self.calls)
        self.calls.append(lambda: run(*args, **named))
        return found


def step_down(op: Op[Any, Any], spec: Any) -> StepDown | None:
    """None if the reference is chosen, or the op has no check to take cases from."""
    chosen = op.chosen(spec)
    if chosen is op.reference or op.check is None:
        return None
    behind = [*op.impls, op.reference][[impl.name for impl in op.impls].index(chosen.name) + 1 :]
    lower = next(
        (impl for impl in behind if impl is op.reference or op.refusal(impl, spec) is None), op.reference
    )
    own, other = (_seconds(op, impl, spec) for impl in (chosen, lower))
    return StepDown(lower.name, other / own) if own else None


def _seconds(op: Op[Any, Any], impl: Impl[Any, Any], spec: Any) -> float:
    calls: list[Callable[[], object]] = []
    assert op.check is not None
    op.check(Noted(impl.bind(spec), calls), op.reference.bind(spec), spec)
    device = device_of(spec)
    if device.type != "cuda":
        return sum(_timed(call, machine.seconds) for call in calls)
    runs = calls if impl is op.reference else [_captured(call) or call for call in calls]
    with torch.cuda.device(device):
        return sum(_timed(run, machine.gpu_seconds) for run in runs)


def _captured(call: Callable[[], object]) -> Callable[[], object] | None:
    """The same in a graph; None where it can not be."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except Exception:  # noqa: BLE001 - libraries raise errors of any kind
        torch.cuda.synchronize()
        return None
    return graph.replay


def _timed(run: Callable[[], object], clock: Callable[[Callable[[], object]], float]) -> float:
    """Median seconds of a run, over enough runs to be timed."""
    run()
    n = max(1, min(100, round(SHORTEST_S / max(clock(run), 1e-7))))

    def many() -> None:
        for _ in range(n):
            run()

    return statistics.median(clock(many) / n for _ in range(REPEATS))


def step_downs(asks: Sequence[Ask]) -> list[StepDown | None]:
    """One for each ask; None for an ask that fails."""
    out: list[StepDown | None] = []
    for op, spec in asks:
        try:
            out.append(step_down(op, spec))
        except Exception:  # noqa: BLE001 - a table with a gap is better than none
            out.append(None)
    return out
