"""The settings of one engine that decide which kernels run: handed to `Op.bind`, or current in a thread.

Each thread has its own, so engines of one process may differ.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

TIERS = {"cuda": ("cuda", "wgmma"), "triton": ("triton",)}
"""Implementations of a tier, by name. The others belong to no tier; only `reference` excludes them."""


@dataclass(frozen=True, slots=True)
class KernelContext:
    """tiers     (op, tier) pairs of `--kernels` (`op.tiers_of`); the op "" stands for all that are not named
    is_exact  batch-invariant mode (exact.py)
    demoted   modules whose implementations failed while they ran, and are not used
    n_thread  of torch; 0: its default. No choice depends on it
    keeps_checks  C++ kernels that passed their check in an earlier process are not checked again (verdicts.py)
    cpu_rows  of products on a CPU (`--cpu-activations`): q16 or q8
    """

    tiers: tuple[tuple[str, str], ...] = ()
    is_exact: bool = False
    demoted: frozenset[str] = frozenset()
    n_thread: int = field(default=0, compare=False)
    keeps_checks: bool = field(default=False, compare=False)
    cpu_rows: str = "q16"

    def wanted(self, op: str, named: str = "") -> str:
        """The tier that `--kernels` gives an op, by its own name or by `named`; or auto."""
        tiers = dict(self.tiers)
        return tiers.get(op) or tiers.get(named or op) or tiers.get("", "auto")

    def left_out(self, op: str, impl: str, named: str = "") -> str | None:
        """Why `--kernels` excludes this implementation; None if it does not."""
        wanted = self.wanted(op, named)
        others = [name for tier, names in TIERS.items() if tier != wanted for name in names]
        if wanted == "auto" or (wanted != "reference" and impl not in others):
            return None
        return f"--kernels wants {wanted}"


class _Here(threading.local):
    context = KernelContext()


_HERE = _Here()


def current() -> KernelContext:
    """This thread's."""
    return _HERE.context


def use(context: KernelContext) -> None:
    """Set this thread's."""
    _HERE.context = context
    if context.n_thread:
        torch.get_num_threads()  # a thread's first question sets its number to that of any thread's last call, behind this one too
        torch.set_num_threads(context.n_thread)


@contextmanager
def within(context: KernelContext) -> Iterator[None]:
    """Set this thread's within a block."""
    before, n_thread = _HERE.context, torch.get_num_threads()
    use(context)
    try:
        yield
    finally:
        _HERE.context = before
        if context.n_thread:
            torch.set_num_threads(n_thread)
