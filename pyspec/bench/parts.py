"""The device's time in a round by kind of kernel: products, attention, recurrent state, others.

A few rounds run under torch's profiler after the measurement, because a profiler slows the rounds down. Kernels inside CUDA graphs
are listed one by one. A kernel's time starts when all earlier kernels have ended, because it may have started early and waited. So the
parts add up to the busy time of the device, drafting included.
"""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pyspec.bench.measure import Turn, Watch, submit_all
from pyspec.errors import PyspecError

if TYPE_CHECKING:
    from pyspec.engine.api import Engine

log = logging.getLogger(__name__)

KINDS = {
    "linear": r"(linear|rows|experts?|moe)(_|$)|.*(nvjet|cublas|cutlass|gemm|gemv|splitk)",
    "attention": r"(attend|rope_kv)(_|$)|.*(flash|fmha|attention)",
    "state": r"(gdn|mamba2?|ssm|conv|recurrent)(_|$)",
}
"""Patterns of kernel names for each part: pyspec's kernels first, then those of libraries."""

DEVICE_PARTS = (*KINDS, "other")
N_ROUND = 20  # profiled rounds
N_START = 4  # rounds after the last prompt that are skipped
N_LINE = 40  # of the list by kernel

Record = tuple[float, float, str]  # start and end in microseconds, kernel


def part_of(kernel: str) -> str:
    """The part that a kernel belongs to, by its name."""
    name = kernel.lower().removeprefix("void ")
    return next((part for part, names in KINDS.items() if re.match(names, name)), "other")


def own_times(records: Iterable[Record]) -> Iterator[tuple[str, float, float]]:
    """Each kernel in order, with the microseconds after all earlier kernels had ended, and the idle microseconds before it."""
    reached: float | None = None
    for begin, end, kernel in sorted(records):
        last = begin if reached is None else reached
        yield kernel, max(0.0, end - max(begin, last)), max(0.0, begin - last)
        reached = max(last, end)


def add_up(records: Iterable[Record], rounds: int) -> dict[str, float]:
    """Milliseconds of one round by part."""
    sums = dict.fromkeys(DEVICE_PARTS, 0.0)
    for kernel, us, _ in own_times(records):
        sums[part_of(kernel)] += us / 1e3
    return {part: ms / max(rounds, 1) for part, ms in sums.items()}


def by_kernel(records: Iterable[Record], rounds: int) -> list[str]:
    """A line for each pair of a kernel and its predecessor, which distinguishes a model's products; most time first. The last line is
    the idle time."""
    times = defaultdict[tuple[str, str], list[float]](list)
    waits = defaultdict[tuple[str, str], float](float)
    before = ""
    for kernel, us, idle in own_times(records):
        times[kernel, before].append(us)
        waits[kernel, before] += idle
        before = kernel
    n = max(rounds, 1)
    lines = [
        f"{sum(us) / n:8.1f} us a round, {len(us) / n:5.1f} of {sum(us) / len(us):6.1f}, {waits[key] / n:5.1f} idle before: "
        f"{key[0][:48]} after {key[1][:32]}"
        for key, us in sorted(times.items(), key=lambda i: -sum(i[1]))[:N_LINE]
    ]
    return [*lines, f"{sum(waits.values()) / n:8.1f} us a round idle"]


def watch_rounds(engine: Engine, prompts: Sequence[tuple[int, ...]], how: Turn) -> dict[str, float]:
    """Device milliseconds of one round by part while all streams decode; empty if they ended too soon.

    The engine must be on a GPU. `how.n_predict` should be enough for some tens of rounds.
    """
    records, rounds = watch_kernels(engine, prompts, how)
    if not rounds:
        return {}
    for line in by_kernel(records, rounds):
        log.info("%s", line)
    return add_up(records, rounds)


def watch_kernels(
    engine: Engine, prompts: Sequence[tuple[int, ...]], how: Turn
) -> tuple[list[Record], int]:
    """The kernels that ran on the GPU in the watched rounds, and the number of rounds; 0 if a stream ended too soon."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    watch = Watch(len(prompts), engine.metrics)
    ids: list[str] = []
    try:
        ids += submit_all(engine.submit, prompts, how, watch)
        if not _reach(engine, watch, N_START):
            return [], 0
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            before = engine.metrics().rounds
            is_whole = _reach(engine, watch, N_ROUND)
            rounds = engine.metrics().rounds - before
    finally:
        for name in ids:
            engine.cancel(name)
    watch.over.wait(60)
    if not is_whole:
        return [], 0
    kernels = (e for e in found.events() if e.device_type == DeviceType.CUDA)
    return [(e.time_range.start, e.time_range.end, e.name) for e in kernels], rounds


def _reach(engine: Engine, watch: Watch, n: int) -> bool:
    """Wait until all streams have started and `n` more rounds have passed; False if a stream ended before."""
    start: int | None = None
    while watch.n_over == 0:
        if start is None and len(watch.started) == watch.n_stream:
            start = engine.metrics().rounds
        if start is not None and engine.metrics().rounds >= start + n:
            return True
        time.sleep(0.001)
    if watch.error is not None:
        raise PyspecError(f"a profiled stream failed: {watch.error}") from watch.error
    return False
