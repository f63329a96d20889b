"""The tiers that `--kernels` asks for: of all ops, or of some by name. Each thread has its own choice, so engines of one process may differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch

from pyspec.cuda import kernel_context, registry, tri
from pyspec.cuda.kernel_context import TIERS, current
from pyspec.cuda.op import Op
from pyspec.errors import ConfigError

MAX_LISTED = 3  # ops in one warning


def use(text: str) -> None:
    """Set this thread's tiers: "triton", or "linear=triton,attend=reference". ConfigError for an unknown op."""
    kernel_context.use(replace(current(), tiers=tuple(sorted(wanted_of(text).items()))))


@contextmanager
def within(text: str) -> Iterator[None]:
    """Set this thread's tiers within a block."""
    with kernel_context.within(current()):
        use(text)
        yield


def unmet(device: torch.device) -> str:
    """The wishes of `--kernels` that are not met, as a message; "" if there are none. Call it once everything is bound."""
    asked = [name for name, tier in current().tiers if tier in TIERS]
    if device.type != "cuda" and not tri.interprets():
        return "these kernels run on GPUs only, and this runs on the CPU, as without them" if asked else ""
    found = [line for op in registry.ops() if (line := _unmet(op))]
    more = f"; and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
    return "; ".join(found[:MAX_LISTED]) + more


def _unmet(op: Op[Any, Any]) -> str:
    wanted = [impl for impl in op.impls if impl.name in TIERS.get(current().wanted(op.name, op.named), ())]
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


@dataclass(frozen=True, slots=True)
class Ways:
    """How an engine's threads compute: a KernelContext, and the number of torch's threads.

    kernels, is_exact, demoted  see KernelContext; `kernels` as text
    n_thread                    0: torch's default
    """

    kernels: str = "auto"
    is_exact: bool = False
    n_thread: int = 0
    demoted: frozenset[str] = frozenset()

    def enter(self) -> None:
        """Apply to this thread."""
        use(self.kernels)
        kernel_context.use(replace(current(), is_exact=self.is_exact, demoted=self.demoted))
        if self.n_thread:
            torch.set_num_threads(self.n_thread)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Apply to this thread within a block."""
        before = torch.get_num_threads()
        with kernel_context.within(current()):
            self.enter()
            try:
                yield
            finally:
                if self.n_thread:
                    torch.set_num_threads(before)
