"""An engine process with planted faults: pyspec.engine.process.engine_main over the real core. For chaos.py and tests.

`python chaos_engine.py FOLDER DESCRIPTOR`. FOLDER/pid names the process that runs. Files that plant something:
round    before the next round, once: "abort", "endless" (Python), "illegal" or "kernel" (an illegal access or an endless
         kernel on a GPU; a segmentation fault or an endless loop without one)
poison   "TOKEN N": abort before a round with a request that has the token in its prompt and has generated N tokens
broken   "MODULE": an illegal access follows each launch of this module of an op
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from pyspec.engine.process import engine_main

BAD = """
extern "C" __global__ void illegal(int* p) { p[(1ll << 44) + threadIdx.x] = 1; }
extern "C" __global__ void endless(volatile int* p) { while (p[0] == 0) {} }
"""


class Plants:
    """The files of a folder, and their effects."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str, *, once: bool = False) -> str:
        path = self.folder / name
        try:
            text = path.read_text().strip()
            if once:
                path.unlink()
        except OSError:
            return ""
        return text

    def before_round(self, core: Any) -> None:
        token, _, n = self.read("poison").partition(" ")
        if token and any(
            int(token) in j.request.prompt and j.n_predicted >= int(n) for j in core.loop.jobs.values()
        ):
            os.abort()
        what = self.read("round", once=True)
        if what == "abort":
            os.abort()
        elif what == "endless":
            while True:
                time.sleep(0.001)
        elif what in ("illegal", "kernel"):
            bad_kernel("illegal" if what == "illegal" else "endless", core.loop.target.device)


def bad_kernel(symbol: str, device: Any) -> None:
    """Launch it among the round's kernels, or do the same on the CPU."""
    if device.type == "cuda":
        launcher(symbol, device)()
    elif symbol == "illegal":
        ctypes.string_at(1)
    else:
        while True:
            pass


def launcher(symbol: str, device: Any) -> Callable[[], None]:
    import torch
    from cuda.core import Program, ProgramOptions

    from pyspec.cuda import jit

    arch = jit.arch_of(torch.cuda.get_device_capability(device))
    code = Program(BAD, "c++", ProgramOptions(arch=arch, std="c++17")).compile("cubin")
    with torch.cuda.device(device):
        kernel = jit.Compiled("planted", arch, code, {}).kernel(symbol, "p")
        place = torch.zeros(1, dtype=torch.int32, device=device)
    return lambda: launch(kernel, (1,), 32, [place])


def launch(kernel: Any, *args: Any) -> None:
    """As jit.Kernel.launch does, whether that was replaced or not."""
    KERNEL_LAUNCH(kernel, *args)


def break_module(module: str, demoted: Collection[str]) -> None:
    """Every launch that comes through `module` brings an illegal access along."""
    import torch

    from pyspec.cuda import checker, jit

    if module in demoted:
        return
    bad: list[Callable[[], None]] = []

    def launch_both(kernel: Any, *args: Any, **options: Any) -> None:
        if module in checker._modules():
            if not bad:
                bad.append(launcher("illegal", torch.device("cuda", kernel.context.device.index)))
            bad[0]()
        KERNEL_LAUNCH(kernel, *args, **options)

    jit.Kernel.launch = launch_both  # type: ignore[method-assign]


def plant(folder: Path) -> None:
    """Wrap the core's rounds once it is loaded."""
    global KERNEL_LAUNCH
    from pyspec.cuda import jit
    from pyspec.engine.process.core import EngineCore

    KERNEL_LAUNCH = jit.Kernel.launch
    plants, load = Plants(folder), EngineCore.load.__func__  # type: ignore[attr-defined]

    def load_planted(cls: type[EngineCore], path: Path, settings: Any, **hooks: Any) -> EngineCore:
        (folder / "pid").write_text(str(os.getpid()))
        if broken := plants.read("broken"):
            break_module(broken, settings.demoted)
        core = load(cls, path, settings, **hooks)
        step = core.loop.step

        def suffer() -> None:
            plants.before_round(core)
            step()

        core.loop.step = suffer
        return core

    EngineCore.load = classmethod(load_planted)  # type: ignore[method-assign, assignment]


KERNEL_LAUNCH: Any = None

if __name__ == "__main__":
    home = Path(sys.argv[1])
    plant(home)
    engine_main.main(int(sys.argv[2]))
