"""Finding the kernel that ends the process: launches one by one, each waited for, and a note of whose it is.

Work on a GPU fails later than it was launched and nothing says which kernel it was. A process that is started after such
a failure may be an examined one: it is slow, and if it fails or hangs the note names the op.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

OPS = "pyspec.cuda.ops."


class Examination:
    """`is_on` is set once, before anything is loaded.

    under_way  modules of ops that the last launch came through, the innermost first; empty when it ended well
    """

    def __init__(self) -> None:
        self.is_on = False
        self.under_way: tuple[str, ...] = ()

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
