"""Finding the kernel that ends the process: launches one by one, each waited for, and a note of whose it is.

Work on a GPU fails later than it was launched and nothing says which kernel it was. A process that is started after such
a failure may be an examined one: it is slow, and if it fails or hangs the note names the op.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType

OPS = "pyspec.cuda.ops."
TIERS = {"cuda": ("cuda", "wgmma"), "triton": ("triton",)}
"""Implementations by their names; others belong to none, and only `reference` leaves them out."""


class WantedHere(threading.local):
    """tiers: the tier that `--kernels` wants for each op by name, "" for all others (tiers.py). Each thread has its own."""

    def __init__(self) -> None:
        self.tiers: dict[str, str] = {}


class Examination:
    """`is_on` is set once, before anything is loaded.

    under_way  modules of ops that the last launch came through, the innermost first; empty when it ended well
    demoted    modules whose implementations are not used
    tiers      WantedHere.tiers
    """

    def __init__(self) -> None:
        self.is_on = False
        self.under_way: tuple[str, ...] = ()
        self.demoted: frozenset[str] = frozenset()
        self._wanted = WantedHere()

    @property
    def tiers(self) -> dict[str, str]:
        return self._wanted.tiers

    @tiers.setter
    def tiers(self, tiers: dict[str, str]) -> None:
        self._wanted.tiers = tiers

    def wanted(self, op: str, named: str = "") -> str:
        """The tier that `--kernels` gives an op, by its own name or by `named`; or auto."""
        return self.tiers.get(op) or self.tiers.get(named or op) or self.tiers.get("", "auto")

    def left_out(self, op: str, impl: str, named: str = "") -> str | None:
        """Why `--kernels` excludes this implementation; None if it does not."""
        wanted = self.wanted(op, named)
        others = [name for tier, names in TIERS.items() if tier != wanted for name in names]
        if wanted == "auto" or (wanted != "reference" and impl not in others):
            return None
        return f"--kernels wants {wanted}"

    def run(self, launch: Callable[[], object], wait: Callable[[], object]) -> None:
        self.under_way = _modules()
        launch()
        wait()
        self.under_way = ()


def _modules() -> tuple[str, ...]:
    frame: FrameType | None = sys._getframe(1)
    found: list[str] = []
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(OPS) and name not in found:
            found.append(name)
        frame = frame.f_back
    return tuple(found)


EXAMINATION = Examination()
