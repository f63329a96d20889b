"""What the device does in a round, by kernel: products, attention, recurrent state, all else.

A few rounds run under torch's profiler, after the measurement, because a profiler slows what it watches. Kernels inside
CUDA graphs are listed one by one. A kernel counts from when all that began before it had ended, for it may have begun early and
waited: so parts add up to the time in which the device was at work, drafting included.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING

from pyspec.bench.measure import Turn, Watch, submit_all
from pyspec.errors import PyspecError

if TYPE_CHECKING:
    from pyspec.engine import Engine

KINDS = {
    "linear": r"(linear|rows|experts?|moe)(_|$)|.*(nvjet|cublas|cutlass|gemm|gemv|splitk)",
    "attention": r"(attend|rope_kv)(_|$)|.*(flash|fmha|attention)",
    "state": r"(gdn|mamba2?|ssm|conv|recurrent)(_|$)",
}
"""Part to the names of its kernels, from their beginning; ours first, then those of libraries."""

DEVICE_PARTS = (*KINDS, "other")
N_ROUND = 20  # rounds to watch
N_START = 4  # rounds after the last prompt that are left out


def part_of(kernel: str) -> str:
    """The part a kernel belongs to, by its name."""
    name = kernel.lower().removeprefix("void ")
    return next((part for part, names in KINDS.items() if re.match(names, name)), "other")


def add_up(records: Iterable[tuple[float, float, str]], rounds: int) -> dict[str, float]:
    """Milliseconds of one round by part, from (begin, end, kernel) in microseconds."""
    sums, reached = dict.fromkeys(DEVICE_PARTS, 0.0), -inf
    for begin, end, kernel in sorted(records):
        sums[part_of(kernel)] += max(0.0, end - max(begin, reached)) / 1e3
        reached = max(reached, end)
    return {part: ms / max(rounds, 1) for part, ms in sums.items()}


def watch_rounds(engine: Engine, prompts: Sequence[tuple[int, ...]], how: Turn) -> dict[str, float]:
    """Device milliseconds of one round by part while all prompts' streams decode; empty if they ended too soon.

    The engine must be on a GPU. `how.n_predict` should be enough for some tens of rounds.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    watch = Watch(len(prompts), engine.metrics)
    ids: list[str] = []
    try:
        ids += submit_all(engine.submit, prompts, how, watch)
        if not _reach(engine, watch, N_START):
            return {}
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            before = engine.metrics().rounds
            is_whole = _reach(engine, watch, N_ROUND)
            rounds = engine.metrics().rounds - before
    finally:
        for name in ids:
            engine.cancel(name)
    watch.over.wait(60)
    if not is_whole:
        return {}
    kernels = (e for e in found.events() if e.device_type == DeviceType.CUDA)
    return add_up(((e.time_range.start, e.time_range.end, e.name) for e in kernels), rounds)


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
