"""Threads of a CPU's loops where nobody says how many: measured at the first load on a machine, and kept.

All hardware threads are often too many: two of a core share its vectors, and those of two sockets each other's memory.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from pyspec.cache import cache_root, write_json
from pyspec.cpu import build, kernels
from pyspec.cuda.ops.linear.cpu import CpuLinearSpec, bind, prepared, sample
from pyspec.gguf import GGMLType

log = logging.getLogger(__name__)

SYSTEM = Path("/sys/devices/system/cpu")
FEW = 4  # threads that are taken without a measurement
WIDTH, N_MATRIX, N_TURN = 2048, 12, 4  # 54 MB of Q8_0 in all, more than second-level caches
WORTH = 0.95  # of the time with more threads, where fewer are taken


def candidates(limit: int) -> list[int]:
    """`limit`, a thread for each core that this process may use, for half of them, and for those of one socket; the largest first."""
    cores, packages = set[str](), Counter[str]()
    with suppress(OSError, AttributeError):
        for cpu in os.sched_getaffinity(0):
            topology = SYSTEM / f"cpu{cpu}" / "topology"
            core = (topology / "thread_siblings_list").read_text()
            if core not in cores:
                cores.add(core)
                packages[(topology / "physical_package_id").read_text()] += 1
    n_core = len(cores) or limit
    found = limit, n_core, n_core // 2, *packages.values()
    return sorted({n for n in found if FEW <= n <= limit}, reverse=True) or [limit]


def usual(limit: int, seconds: Callable[[int], float] | None = None) -> int:
    """The number of `candidates(limit)` with which products of one row and of 64 take least time. seconds: the time with so many."""
    found = [limit] if limit <= FEW or kernels.missing() is not None else candidates(limit)
    if len(found) == 1:
        return limit
    path, kept = cache_root() / "cpu" / "threads.json", dict[str, int]()
    key = f"{found} {build.file_name(build.isas()[0])} {_model()}"
    with suppress(OSError, ValueError, AttributeError):
        kept = json.loads(path.read_text())
        if kept.get(key) in found:
            return kept[key]
    seconds = seconds or _Timed()
    times = {n: seconds(n) for n in reversed(found)}
    best = found[0]
    for n in found[1:]:
        best = n if times[n] < WORTH * times[best] else best
    said = ", ".join(f"{n}: {1e6 * times[n]:.1f}" for n in found)
    log.info("threads: %d (by measured times: %s); -t sets another number", best, said)
    write_json(path, kept | {key: best})
    return best


def _model() -> str:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith("model name")), "")
    return ""


class _Timed:
    """seconds(n): the time of a row and of 64 rows through the same matrices, multiplied, so that each counts as much."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.raws = [sample(GGMLType.Q8_0, WIDTH, WIDTH, draw) for _ in range(N_MATRIX)]
        self.product = bind(CpuLinearSpec(torch.device("cpu"), GGMLType.Q8_0))

    def __call__(self, n: int) -> float:
        made = 1.0
        with kernels.threads(n):
            for n_row in (1, 64):
                rows = prepared(torch.ones(n_row, WIDTH), None, whole=True)
                out = torch.empty(n_row, WIDTH)
                made *= min(self._turn(rows, out) for _ in range(N_TURN))
        return made

    def _turn(self, rows: object, out: torch.Tensor) -> float:
        began = time.perf_counter()
        for raw in self.raws:
            self.product(rows, raw, out, 1.0, None)  # type: ignore[arg-type]
        return time.perf_counter() - began
