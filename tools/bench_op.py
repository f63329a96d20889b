"""Time an op: every call that its own check makes, in each implementation, in the shapes that models have.

    python tools/bench_op.py linear gdn                          all implementations that run here
    python tools/bench_op.py attend --impl cuda triton --shape q8_0 --cold
    python tools/bench_op.py linear --set pyspec.cuda.ops.linear.pair:MOST_BYTES=0    another number in a module

A line for each call: its tensors, microseconds (median), their bytes over that time. On a GPU a call runs in a CUDA graph if the
implementation can be captured. `--cold` writes over the cache before each call, so weights come from memory; the time of that
write is subtracted. `--kernels` lists the device time of each kernel instead. `--check` compares with the reference first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from pyspec.cuda import survey
from pyspec.cuda.op import Impl, Op

N_TIME, SHORTEST_S = 7, 2e-4
COLD_BYTES = 256 << 20  # more than any cache holds
LOAD_ONLY = ("pack",)  # called by a load, never by a round


@dataclass
class Call:
    """One call of a launch: its name, how to repeat it, and the tensors that it was given and returned."""

    name: str
    run: Callable[[], object]
    tensors: list[Tensor]

    @property
    def n_byte(self) -> int:
        return sum(
            x.numel() * x.element_size() for x in {x.data_ptr(): x for x in self.tensors}.values()
        )

    def __str__(self) -> str:
        shapes = " ".join("x".join(map(str, x.shape)) for x in self.tensors[:4])
        return f"{self.name}({shapes}{' ...' if len(self.tensors) > 4 else ''})"


def tensors_in(value: object) -> Iterator[Tensor]:
    """Tensors of an argument: itself, or in the lists and dataclasses that it consists of."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors_in(getattr(value, each.name))


@dataclass
class Recorder:
    """Stands in for a launch and records its calls, those of returned functions included."""

    launch: Any
    calls: list[Call] = field(default_factory=list)
    name: str = ""

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._call(self.launch, self.name or "call", args, named)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.launch, name)
        if not callable(found) or name in LOAD_ONLY:
            return found
        return lambda *args, **named: self._call(found, name, args, named)

    def _call(
        self, run: Callable[..., Any], name: str, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        found = run(*args, **named)
        if callable(found) and not isinstance(found, Tensor):
            return Recorder(found, self.calls, name)
        self.calls.append(
            Call(name, lambda: run(*args, **named), list(tensors_in([*args, *named.values(), found])))
        )
        return found


def recorded(op: Op[Any, Any], impl: Impl[Any, Any], spec: Any) -> tuple[list[Call], str | None]:
    """The calls of the op's check, and its verdict."""
    assert op.check is not None
    recorder = Recorder(impl.bind(spec))
    return recorder.calls, op.check(recorder, op.reference.bind(spec), spec)


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a graph; the call itself if a library can not be captured."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except Exception:  # noqa: BLE001 - a library may raise anything
        torch.cuda.synchronize()
        return call
    return graph.replay


def seconds(
    run: Callable[[], object], device: torch.device, before: Callable[[], object] | None = None
) -> float:
    """Median seconds of one run; the time of `before`, which runs first, is subtracted."""
    if before is not None:
        spoil = before
        return max(0.0, seconds(lambda: (spoil(), run()), device) - seconds(spoil, device))
    run()
    n = max(1, min(200, round(SHORTEST_S / max(_clock(run, 1, device), 1e-7))))
    return statistics.median(_clock(run, n, device) / n for _ in range(N_TIME))


def _clock(run: Callable[[], object], n: int, device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(n):
            run()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
    start.record()
    for _ in range(n):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def kernels_of(call: Call) -> str:
    """Device time of each kernel of a call, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call.run()
        torch.cuda.synchronize()
    return ", ".join(f"{e.key[:48]} {e.device_time_total:.1f} us" for e in found.key_averages())


def implementations(op: Op[Any, Any], spec: Any, names: list[str]) -> Iterator[Impl[Any, Any]]:
    """The chosen names, or all that do not refuse the spec."""
    for impl in (*op.impls, op.reference):
        if names and impl.name not in names:
            continue
        why = None if impl is op.reference else op.refusal(impl, spec)
        if why is None:
            yield impl
        else:
            print(f"  {impl.name}: {why}")


def bench(op: Op[Any, Any], spec: Any, args: argparse.Namespace, device: torch.device) -> bool:
    """Print the calls of one op in one shape. False if a check found an implementation wrong."""
    print(f"{op.name}: {survey.shape_of(spec)}", flush=True)
    right = True
    trash = torch.empty(COLD_BYTES if args.cold else 0, dtype=torch.uint8, device=device)
    for impl in implementations(op, spec, args.impl):
        calls, why = recorded(op, impl, spec)
        if args.check:
            print(f"  {impl.name}: {why or 'right'}")
            right = right and why is None
        for call in calls:
            if args.kernels:
                print(f"  {impl.name:8} {call}: {kernels_of(call)}", flush=True)
                continue
            run = captured(call.run) if device.type == "cuda" and impl.capturable else call.run
            us = 1e6 * seconds(run, device, trash.zero_ if args.cold else None)
            rate = call.n_byte / us / 1e3 if us else 0.0
            print(f"  {impl.name:8} {call!s:60} {us:10.1f} us {rate:8.0f} GB/s", flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ops", nargs="+", metavar="OP")
    parser.add_argument("--impl", nargs="*", default=[])
    parser.add_argument("--shape", default="", help="only specs whose description has this text")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="MODULE:NAME=NUMBER")
    args = parser.parse_args()
    for text in args.set:
        where, number = text.split("=")
        module, name = where.split(":")
        setattr(import_module(module), name, type(getattr(import_module(module), name))(number))
    device = torch.device(args.device)
    asks = [(op, spec) for op, spec in survey.standard(device) if op.check is not None]
    if unknown := set(args.ops) - {op.name for op, _ in asks}:
        print(
            f"no such op: {', '.join(sorted(unknown))}; there are {', '.join(dict.fromkeys(op.name for op, _ in asks))}"
        )
        return 2
    chosen = [
        (op, spec) for op, spec in asks if op.name in args.ops and args.shape in survey.shape_of(spec)
    ]
    right = [bench(op, spec, args, device) for op, spec in chosen]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
