"""The ops there are: each folder of `pyspec.cuda.ops` with an `op.py`, which holds `OPS` or an op of the folder's name.

`--kernels` names them: what it asks for, and what of that is not to be had.
"""

from __future__ import annotations

import pkgutil
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from pyspec.cuda import tri
from pyspec.cuda.kernel_context import TIERS, current
from pyspec.cuda.op import Op
from pyspec.errors import ConfigError

FOLDER = "pyspec.cuda.ops"
MAX_LISTED = 3  # ops in one warning


def every() -> list[Op[Any, Any]]:
    """All ops by their folders' names, and those that are parts of others."""
    folders = sorted(
        found.name for found in pkgutil.iter_modules(import_module(FOLDER).__path__) if found.ispkg
    )
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


def tiers_of(text: str) -> tuple[tuple[str, str], ...]:
    """Tiers by op, as in KernelContext, of "triton" or "linear=triton,attend=reference". ConfigError for an unknown op."""
    if "=" not in text:
        return () if text == "auto" else (("", text),)
    wanted = dict(part.split("=") for part in text.split(","))
    known = names()
    for name in wanted:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--kernels: there is no op {name}{hint} (there are {', '.join(known)})")
    return tuple(sorted(wanted.items()))


def unmet(device: torch.device) -> str:
    """The wishes of `--kernels` that are not met, as a message; "" if there are none. Call it once everything is bound."""
    asked = [name for name, tier in current().tiers if tier in TIERS]
    if device.type != "cuda" and not tri.interprets():
        return (
            "these kernels run on GPUs only, and this runs on the CPU, as without them" if asked else ""
        )
    found = [line for op in ops() if (line := _unmet(op))]
    more = f"; and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
    return "; ".join(found[:MAX_LISTED]) + more


def _unmet(op: Op[Any, Any]) -> str:
    wanted = [
        impl for impl in op.impls if impl.name in TIERS.get(current().wanted(op.name, op.named), ())
    ]
    for spec, impl in op.decided.items():
        if wanted and impl not in wanted:
            return f"{op.name} runs as {impl.name} ({wanted[0].name}: {op.refusal(wanted[0], spec)})"
    return ""
