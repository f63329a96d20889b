"""Servers running on this machine: each keeps a file with its address while it runs."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pyspec.cache import cache_root


@dataclass(frozen=True)
class Running:
    """A server of this user: its process, address and model."""

    pid: int
    url: str
    model: str
    began: float


def folder() -> Path:
    """The folder of these files, readable by this user only."""
    return cache_root(tells=False) / "running"


def enter(url: str, model: str) -> Path | None:
    """Write this server's file; None if that fails, which only hides it from `pyspec ps`."""
    path = folder() / f"{os.getpid()}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = asdict(Running(os.getpid(), url, model, time.time()))
        path.write_text(json.dumps(about), encoding="utf-8")
    except OSError:
        return None
    return path


def leave(path: Path | None) -> None:
    """Remove the file of a server that has ended."""
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()


def running() -> Iterator[Running]:
    """Servers whose processes are alive, oldest first; removes the files of others."""
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
