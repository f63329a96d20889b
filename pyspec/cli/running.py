"""Servers that run on this machine: each leaves a file that says where it listens, for as long as it does."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Running:
    """A server of this user: its process, where it listens, and what it serves."""

    pid: int
    url: str
    model: str
    began: float


def folder() -> Path:
    """Where the files are: of this user alone."""
    root = os.environ.get("PYSPEC_CACHE") or Path.home() / ".cache" / "pyspec"
    return Path(root) / "running"


def enter(url: str, model: str) -> Path | None:
    """Say that this process serves a model; None if the file can not be written, which costs nothing but `pyspec ps`."""
    path = folder() / f"{os.getpid()}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(json.dumps(asdict(Running(os.getpid(), url, model, time.time()))), encoding="utf-8")
    except OSError:
        return None
    return path


def leave(path: Path | None) -> None:
    """The server is gone."""
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()


def running() -> Iterator[Running]:
    """Servers whose processes live, the oldest first; files of others are removed."""
    for path in sorted(folder().glob("*.json"), key=lambda p: p.stem.rjust(12, "0")):
        try:
            one = Running(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        if _lives(one.pid):
            yield one
        else:
            leave(path)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
