"""Where findings about this machine are kept (kernels, verdicts, running servers), and how many cores there are. No torch."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)


def cache_root() -> Path:
    return Path(os.environ.get("PYSPEC_CACHE") or Path.home() / ".cache" / "pyspec")


def write_json(path: Path, content: object) -> None:
    """Write a file of findings whole or not at all. A folder that can not be written costs the next process a measurement."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump(content, file, indent=1)
        os.replace(file.name, path)
    except OSError as e:
        with contextlib.suppress(OSError, NameError):
            os.unlink(file.name)
        log.debug("%s is not kept: %s", path, e)


def n_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
