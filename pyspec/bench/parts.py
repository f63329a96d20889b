"""What the device does in a round, by kernel: products, attention, recurrent state, all else.

A few rounds run under torch's profiler, after the measurement, because a profiler slows what it watches. Kernels inside
CUDA graphs are listed one by one. A kernel counts from when all that began before it had ended, for it may have begun early and
waited: so parts add up to the time in which the device was at work, drafting included.
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
"""Part to the names of its kernels, from their beginning; ours first, then those of libraries."""

DEVICE_PARTS = (*KINDS, "other")
N_ROUND = 20  # rounds to watch
N_START = 4  # rounds after the last prompt that are left out
N_LINE = 40  # of the list by kernel

Record = tuple[float, float, str]  # begin and end in microseconds, kernel


def part_of(kernel: str) -> str:
    """The part a kernel belongs to, by its name."""
    name = kernel.lower().removeprefix("void ")
    return next((part for part, names in KINDS.items() if re.match(names, name)), "other")


def own_times(records: Iterable[Record]) -> Iterator[tuple[str, float, float]]:
    """Each kernel in order, with the microseconds in which none that began before it still ran, and those before it in which
    nothing ran."""
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
    """A line for each kernel and the one that ran before it, which tells a model's products apart: most time first. A last one
    for the time in which nothing ran."""
    times, waits = defaultdict[tuple[str, str], list[float]](list), defaultdict[tuple[str, str], float](float)
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
    return [*lines, f"{sum(waits.values()) / n:8.1f} us a round in which the device did nothing"]


def watch_rounds(engine: Engine, prompts: Sequence[tuple[int, ...]], how: Turn) -> dict[str, float]:
    """Device milliseconds of one round by part while all prompts' streams decode; empty if they ended too soon.

    The engine must be on a GPU. `how.n_predict` should be enough for some tens of rounds.
    """
    records, rounds = watch_kernels(engine, prompts, how)
    if not rounds:
        return {}
    for line in by_kernel(records, rounds):
        log.info("%s", line)
    return add_up(records, rounds)


def watch_kernels(engine: Engine, prompts: Sequence[tuple[int, ...]], how: Turn) -> tuple[list[Record], int]:
    """What ran on the GPU in so many rounds, as `watch_rounds` has it; no rounds if a stream ended too soon."""
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
    """Wait until all streams have begun and `n` more rounds have passed; False if a stream ended before."""
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
