"""What a step down costs: an op's launches by what runs on this machine, and by what would run if that were refused.

The cases are those of the op's own check, so every op has some: a check is run once for each of the two with a launch that writes down how it was
called, and the calls are then timed. In a graph, where the implementation may stand in one, as rounds run; else one by one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyspec.cuda.op import Impl, Op, device_of

REPEATS = 5
SHORTEST_S = 2e-4  # of what is timed at once
UNTIMED = ("pack",)  # what a load calls, and no round


@dataclass(frozen=True, slots=True)
class StepDown:
    """`impl` is what would run instead of the chosen one. times: its time over the chosen one's, of all calls of a check together."""

    impl: str
    times: float


class Noted:
    """A launch that remembers its calls; so does what it returns, if that is called."""

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
    """None where nothing lies below what is chosen, or the op has no check to take cases from."""
    chosen = op.chosen(spec)
    if chosen is op.reference or op.check is None:
        return None
    behind = [*op.impls, op.reference][[impl.name for impl in op.impls].index(chosen.name) + 1 :]
    lower = next((impl for impl in behind if impl is op.reference or op.refusal(impl, spec) is None), op.reference)
    own, other = (_seconds(op, impl, spec) for impl in (chosen, lower))
    return StepDown(lower.name, other / own) if own else None


def _seconds(op: Op[Any, Any], impl: Impl[Any, Any], spec: Any) -> float:
    calls: list[Callable[[], object]] = []
    assert op.check is not None
    op.check(Noted(impl.bind(spec), calls), op.reference.bind(spec), spec)
    device = device_of(spec)
    if device.type != "cuda":
        return sum(_timed(call, _clock) for call in calls)
    runs = calls if impl is op.reference else [_captured(call) or call for call in calls]
    return sum(_timed(run, lambda run, n: _events(device, run, n)) for run in runs)


def _captured(call: Callable[[], object]) -> Callable[[], object] | None:
    """The same in a graph; None where it can not be."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except Exception:  # noqa: BLE001 - whatever a library says of it
        torch.cuda.synchronize()
        return None
    return graph.replay


def _timed(run: Callable[[], object], clock: Callable[[Callable[[], object], int], float]) -> float:
    """Median seconds of one of so many that they can be timed."""
    run()
    n = max(1, min(100, round(SHORTEST_S / max(clock(run, 1), 1e-7))))
    return statistics.median(clock(run, n) / n for _ in range(REPEATS))


def _clock(run: Callable[[], object], n: int) -> float:
    began = time.perf_counter()
    for _ in range(n):
        run()
    return time.perf_counter() - began


def _events(device: torch.device, run: Callable[[], object], n: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
    with torch.cuda.device(device):
        start.record()
        for _ in range(n):
            run()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1e3


def step_downs(asks: Sequence[tuple[Op[Any, Any], Any]]) -> list[StepDown | None]:
    """Of each; what fails on its way says nothing."""
    out: list[StepDown | None] = []
    for op, spec in asks:
        try:
            out.append(step_down(op, spec))
        except Exception:  # noqa: BLE001 - a table with a gap is better than none
            out.append(None)
    return out
