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
    return next((FreeMemory(*gpu) for gpu in _gpus()), None) or _of_machine()


def card_memory() -> dict[str, int]:
    """Free bytes of each GPU, by its name as a device."""
    return {f"cuda:{i}": free for i, (_, free) in enumerate(_gpus())}


def host_memory() -> int:
    """Free bytes of this machine; 8 GiB if that is unknown."""
    found = _of_machine()
    return 8 << 30 if found is None else found.free


def _gpus() -> list[tuple[str, int]]:
    """Name and free bytes of each GPU."""
    tool = which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
        rows = (line.rsplit(",", 1) for line in done.stdout.strip().splitlines())
        return [(name.strip(), int(free) << 20) for name, free in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _of_machine() -> FreeMemory | None:
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
    return FreeMemory("the CPU", free << 10)
