"""How an engine's threads compute: what holds for one engine of a process holds for no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pyspec.cuda import exact, tiers


@dataclass(frozen=True, slots=True)
class Ways:
    """kernels: what ops run as (tiers.py); is_exact: rows have the same bits in any company (exact.py); n_thread: of torch, 0: as many as it has."""

    kernels: str = "auto"
    is_exact: bool = False
    n_thread: int = 0

    def enter(self) -> None:
        """For all that this thread does from now on."""
        tiers.use(self.kernels)
        exact.use(self.is_exact)
        if self.n_thread:
            torch.set_num_threads(self.n_thread)

    @contextmanager
    def here(self) -> Iterator[None]:
        """For what this thread does in this block."""
        before = torch.get_num_threads()
        with tiers.within(self.kernels), exact.within(self.is_exact):
            if self.n_thread:
                torch.set_num_threads(self.n_thread)
            try:
                yield
            finally:
                if self.n_thread:
                    torch.set_num_threads(before)
