"""Installs torch for `make`: with CUDA where there is an NVIDIA driver, for the CPU elsewhere. Needs nothing but Python and pip.

pip's torch for Linux is the build with CUDA, several gigabytes. PyTorch keeps its CPU builds in an index of its own, which uv knows
(`--torch-backend cpu`). A torch that is there already and new enough stays. TORCH in the environment goes before all of it: words for
`pip install`, such as TORCH="torch==2.12.0".
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import which

LEAST = (2, 11)  # as pyproject.toml has it
WANTED = f"torch>={LEAST[0]}.{LEAST[1]}"
TESTED = "torch==2.13.0"  # the version of the tests
# The last is WSL's
DRIVER_FILES = (
    "/proc/driver/nvidia/version",
    "/sys/module/nvidia/version",
    "/usr/lib/wsl/lib/libcuda.so.1",
)
UV = "uv>=0.7"
NO_CPU_BUILD = (
    f"no CPU build: PyTorch's index can not be reached. Taking {TESTED} from pip's own; if that is the build with CUDA, it downloads 3 GB "
    "and takes 6 GB of disk. TORCH=... names another (README, 'Start')"
)

Run = Callable[[Sequence[str]], int]


def is_new_enough(found: str) -> bool:
    """Whether pyspec runs with this version of torch; "" if there is none."""
    number = re.match(r"(\d+)\.(\d+)", found)
    return number is not None and (int(number[1]), int(number[2])) >= LEAST


def has_driver(root: Path = Path("/"), find: Callable[[str], str | None] = which) -> bool:
    """Whether this machine has an NVIDIA driver, by the kernel's files or by its tool."""
    return (
        any((root / name.lstrip("/")).exists() for name in DRIVER_FILES)
        or find("nvidia-smi") is not None
    )


def commands(asked: str, found: str, *, is_linux: bool, driver: bool) -> list[list[str]]:
    """Ways to get torch, the best first: arguments of `python -m`. The first that succeeds is enough; none: it is there.

    asked  words for pip that go before everything
    found  the version that is installed, or ""
    """
    if asked:
        return [["pip", "install", *shlex.split(asked)]]
    if is_new_enough(found):
        return []
    if driver or not is_linux:
        return [["pip", "install", WANTED]]
    return [
        ["uv", "pip", "install", "--python", sys.executable, "--torch-backend", "cpu", WANTED],
        ["pip", "install", TESTED],
    ]


def install(todo: Sequence[Sequence[str]], run: Run, say: Callable[[str], None]) -> int:
    """Try the ways in turn; the exit status of the last that was tried."""
    status = 0
    for i, words in enumerate(todo):
        if i:
            say(NO_CPU_BUILD)
        if words[0] == "uv":
            status = run(["pip", "install", "--quiet", UV])
            if status:
                continue
        status = run(words)
        if not status:
            return 0
    return status


def _run(words: Sequence[str]) -> int:
    print("+ python -m", shlex.join(words), flush=True)
    return subprocess.run([sys.executable, "-m", *words]).returncode


def _found() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def main() -> int:
    asked, found, driver = os.environ.get("TORCH", ""), _found(), has_driver()
    todo = commands(asked, found, is_linux=platform.system() == "Linux", driver=driver)
    if not todo:
        print(f"torch {found} is here already")
    elif not asked:
        print(f"installing torch: {'an' if driver else 'no'} NVIDIA driver is here", flush=True)
    return install(todo, _run, lambda text: print(text, flush=True))


if __name__ == "__main__":
    sys.exit(main())
