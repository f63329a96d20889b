"""Where findings about this machine are kept (kernels, verdicts, running servers), and how many cores there are. No torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")


def cache_root() -> Path:
    return Path(os.environ.get("PYSPEC_CACHE") or Path.home() / ".cache" / "pyspec")


def n_cores() -> int:
    """Processors that this process may use; fewer where its container gets less time than theirs."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([n, *_quotas()]))


def _quotas() -> list[int]:
    """Whole processors of the limits of this process's control groups, version 2 and then 1."""
    found = []
    with suppress(OSError):
        own = [x[4:] for x in Path("/proc/self/cgroup").read_text().splitlines() if x.startswith("0::/")]
        folder = GROUPS.joinpath(*own)
        texts = [at / "cpu.max" for at in (folder, *folder.parents)]
        of_one = GROUPS / "cpu" / "cpu.cfs_quota_us", GROUPS / "cpu" / "cpu.cfs_period_us"
        for paths in (*zip(texts), of_one):
            with suppress(OSError, ValueError):  # no such group; "max"
                quota, period = map(int, " ".join(path.read_text() for path in paths).split())
                found += [-(-quota // period)] if quota > 0 else []
    return found
