"""The part of a load that needs no torch, on a thread beside torch's import: torch's library, the model's head, weights for a CPU.

Nothing is decided here. What fails is done again by the load, which reports it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from pyspec.config import EngineSettings
from pyspec.engine.messages import Load
from pyspec.errors import PyspecError
from pyspec.gguf import GGUFFile, open_gguf

MEMINFO = Path("/proc/meminfo")
SHARE = 0.5  # of the free memory: a larger file is read after its plan, which may refuse it
OF_DEVICES = ("cuda", "hip", "xpu")


class EarlyLoad:
    """Receives the first message and begins with what it asks for.

    message  the first one, once `wait` returned
    file     the model, opened; None if it is left to the load
    """

    def __init__(self, receive: Callable[[], object]) -> None:
        self.message: object = None
        self.file: GGUFFile | None = None
        self._receive = receive
        self._thread = threading.Thread(target=self._run, name="pyspec-early", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the first message; also None, if the other side is gone."""
        self._thread.join()

    def _run(self) -> None:
        library = cpu_library()
        if library is not None:
            with suppress(OSError):
                ctypes.CDLL(str(library))  # without the interpreter's lock; torch's import then finds it
        self.message = self._receive()
        if isinstance(self.message, Load):
            with suppress(OSError, PyspecError):
                self.file = begun(self.message.path, self.message.settings, library is not None)


def cpu_library() -> Path | None:
    """The library of a torch that was built for CPUs alone; None for another build, which loads libraries of drivers first."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).with_name("lib")
    library = folder / "libtorch_cpu.so"
    is_alone = not any((folder / f"libtorch_{name}.so").exists() for name in OF_DEVICES)
    return library if is_alone and library.is_file() else None


def begun(path: Path, settings: EngineSettings, is_cpu: bool) -> GGUFFile | None:
    """The model's file, its weights under way into memory; None if they are not for one CPU, or are unpacked. Raises PyspecError.

    is_cpu  torch has no other devices
    """
    if not is_cpu and settings.device != "cpu":
        return None
    if settings.tp > 1 or settings.weights == "dense":
        return None
    file = open_gguf(path)
    if file.n_bytes <= SHARE * _free_bytes():
        file.begin_ahead()
    return file


def _free_bytes() -> int:
    lines = MEMINFO.read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)
