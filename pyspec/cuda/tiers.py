"""What ops may run as, as a person wants it (`--kernels`): all of them, or some by name. Each engine's threads have a choice of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch

from pyspec.cuda import registry, tri
from pyspec.cuda.examine import EXAMINATION, TIERS
from pyspec.cuda.op import Op
from pyspec.errors import ConfigError

SAID = 3  # ops that one warning names


def use(text: str) -> None:
    """From now on this thread chooses ops so: "triton", or "linear=triton,attend=reference". ConfigError for an op that is none."""
    EXAMINATION.tiers = wanted_of(text)


@contextmanager
def within(text: str) -> Iterator[None]:
    """In this block this thread does."""
    before = EXAMINATION.tiers
    use(text)
    try:
        yield
    finally:
        EXAMINATION.tiers = before


def unmet(device: torch.device) -> str:
    """What was wanted and is not to be had, in words; "" if nothing is. Asked once everything is bound."""
    asked = [name for name, tier in EXAMINATION.tiers.items() if tier in TIERS]
    if device.type != "cuda" and not tri.interprets():
        return "these kernels run on GPUs only, and this runs on the CPU, as without them" if asked else ""
    found = [line for op in registry.ops() if (line := _unmet(op))]
    more = f"; and {len(found) - SAID} more" if len(found) > SAID else ""
    return "; ".join(found[:SAID]) + more


def _unmet(op: Op[Any, Any]) -> str:
    wanted = [impl for impl in op.impls if impl.name in TIERS.get(EXAMINATION.wanted(op.name, op.named), ())]
    for spec, impl in op.decided.items():
        if wanted and impl not in wanted:
            return f"{op.name} runs as {impl.name} ({wanted[0].name}: {op.refusal(wanted[0], spec)})"
    return ""


def wanted_of(text: str) -> dict[str, str]:
    """Tiers by op; "" stands for all that are not named."""
    if "=" not in text:
        return {} if text == "auto" else {"": text}
    wanted = dict(part.split("=") for part in text.split(","))
    names = registry.names()
    for name in wanted:
        if name not in names:
            near = get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--kernels: there is no op {name}{hint} (there are {', '.join(names)})")
    return wanted
