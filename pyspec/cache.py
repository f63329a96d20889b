"""Where findings about this machine are kept (kernels, verdicts, running servers), and how many cores there are. No torch."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import tempfile
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)
GROUPS = Path("/sys/fs/cgroup")


def cache_root(*, tells: bool = True) -> Path:
    """The folder of PYSPEC_CACHE, or ~/.cache/pyspec; where that can not be written, a private one under TMPDIR, which the log tells once."""
    wanted = wanted_root()
    found, why = _usable(wanted, tempfile.gettempdir())
    if why and tells:
        _tell(
            f"{wanted} can not be written ({why}): {found} is used; the variable PYSPEC_CACHE names another folder"
        )
    return found


def wanted_root() -> Path:
    """The folder that was asked for, writable or not."""
    return Path(os.environ.get("PYSPEC_CACHE") or Path(os.path.expanduser("~")) / ".cache" / "pyspec")


@cache
def _tell(line: str) -> None:
    log.warning("%s", line)


@cache
def _usable(wanted: Path, temporary: str) -> tuple[Path, str]:
    """The folder to use, and why it is not the wanted one."""
    private = Path(temporary) / f"pyspec-{os.geteuid()}"
    if not (why := _flaw(wanted)) or not _is_private(private):
        return wanted, ""
    return private, why


def _flaw(folder: Path) -> str:
    """Why no file can be made in a folder, which may be still to be made; "" if one can."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not there.is_dir():
        return f"{there} is no folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} is read-only here"


def _is_private(folder: Path) -> bool:
    """Whether a folder is, or has just been made, one that only this user may write to."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


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
    """Processors that this process may use; fewer where its container gets less time than theirs."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([n, *_quotas()]))


def _quotas() -> list[int]:
    """Whole processors of the limits of this process's control groups, version 2 and then 1."""
    found = []
    with contextlib.suppress(OSError):
        own = [x[4:] for x in Path("/proc/self/cgroup").read_text().splitlines() if x.startswith("0::/")]
        folder = GROUPS.joinpath(*own)
        texts = [at / "cpu.max" for at in (folder, *folder.parents)]
        of_one = GROUPS / "cpu" / "cpu.cfs_quota_us", GROUPS / "cpu" / "cpu.cfs_period_us"
        for paths in (*zip(texts), of_one):
            with contextlib.suppress(OSError, ValueError):  # no such group; "max"
                quota, period = map(int, " ".join(path.read_text() for path in paths).split())
                found += [-(-quota // period)] if quota > 0 else []
    return found
