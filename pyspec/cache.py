"""Where findings about this machine are kept (kernels, verdicts, running servers), and how many cores there are. No torch."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    return Path(os.environ.get("PYSPEC_CACHE") or Path.home() / ".cache" / "pyspec")


def n_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
