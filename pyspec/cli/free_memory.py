"""Free memory of this machine for a model, found without torch, whose import takes seconds."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from shutil import which

ASK_S = 5.0  # do not wait longer for a hanging driver
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class FreeMemory:
    """Free bytes, and the device that has them."""

    where: str
    free: int


def free_memory() -> FreeMemory | None:
    """Free memory of the first GPU, else of the machine. None if unknown."""
    return _of_gpu() or _of_machine()


def _of_gpu() -> FreeMemory | None:
    tool = which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=name,memory.free", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
        said = done.stdout
        name, free = said.strip().splitlines()[0].rsplit(",", 1)
        return FreeMemory(name.strip(), int(free) << 20)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _of_machine() -> FreeMemory | None:
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
    return FreeMemory("the CPU", free << 10)
