"""The ops there are: each folder of `pyspec.cuda.ops` with an `op.py`, which holds `OPS` or an op of the folder's name."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pyspec.cuda.op import Op

FOLDER = "pyspec.cuda.ops"


def every() -> list[Op[Any, Any]]:
    """All ops by their folders' names, and those that are parts of others."""
    folders = sorted(found.name for found in pkgutil.iter_modules(import_module(FOLDER).__path__) if found.ispkg)
    return [op for name in folders if find_spec(f"{FOLDER}.{name}.op") for op in _ops_in(name)]


def _ops_in(folder: str) -> tuple[Op[Any, Any], ...]:
    module = import_module(f"{FOLDER}.{folder}.op")
    found: tuple[Op[Any, Any], ...] = vars(module).get("OPS") or (vars(module)[folder],)
    return found


def ops() -> list[Op[Any, Any]]:
    """Those that are listed: doctor shows them, and `--kernels` takes their names."""
    return [op for op in every() if op.is_listed]


def names() -> list[str]:
    return [op.name for op in ops()]


def guarded() -> dict[int, Op[Any, Any]]:
    """Ops whose kernels have guards, by the number in a fault record."""
    return {op.guard.number: op for op in every() if op.guard is not None}
