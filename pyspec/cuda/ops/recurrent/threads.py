"""Independent pieces of work on the CPU: half of them on a second thread, where torch has more than one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(torch.get_num_threads() - 1, 1), "pyspec-state")


def run_all(one: Callable[..., None], work: Sequence[tuple[int, ...]]) -> None:
    """one(*w) for each w; `one` must release the interpreter's lock to gain anything."""

    def run(part: Sequence[tuple[int, ...]]) -> None:
        for w in part:
            one(*w)

    half = len(work) // 2 if torch.get_num_threads() > 1 else 0
    other = _pool().submit(run, work[:half]) if half else None
    run(work[half:])
    if other is not None:
        other.result()
