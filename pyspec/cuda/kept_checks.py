"""Checks of the C++ kernels that passed on this machine, kept on disk for later starts: half a second of each.

They hold for one build of the library, one torch, and the sources of the checks as they are. Only engines in processes of their own
read and write them; a check that failed is repeated.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from functools import cache
from hashlib import blake2b
from pathlib import Path

import torch

from pyspec.cpu.build import find, isas
from pyspec.cuda import verdicts

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("cpu", "cuda", "slots", "gguf")
NAME = "cpu.json"
MOST = 4096  # checks in the file; one with more begins again


@cache
def _about() -> str:
    """A digest of all that a check depends on. Sources count by size and time, because reading two hundred takes as long as a check."""
    digest = blake2b(digest_size=16)
    library = find(isas()[0])
    digest.update(f"{torch.__version__} {None if library is None else library.name}".encode())
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        about = path.stat()
        digest.update(f"{path.relative_to(ROOT)} {about.st_size} {about.st_mtime_ns}\n".encode())
    return digest.hexdigest()


@cache
def _passed() -> set[str]:
    try:
        kept = json.loads((verdicts.folder() / NAME).read_text())
        if kept["about"] == _about() and len(kept["passed"]) <= MOST:
            return set(map(str, kept["passed"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return set()


def has_passed(home: str, impl: str, spec: object) -> bool:
    return f"{home} {impl} {spec!r}" in _passed()


def keep(home: str, impl: str, spec: object) -> None:
    """A process that keeps another check at the same time may overwrite this one, which costs the next start a check."""
    passed = _passed()
    passed.add(f"{home} {impl} {spec!r}")
    path = verdicts.folder() / NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump({"about": _about(), "passed": sorted(passed)}, file, indent=1)
        os.replace(file.name, path)
    except OSError as e:
        with contextlib.suppress(OSError, NameError):
            os.unlink(file.name)
        log.debug("a check is not kept: %s", e)
