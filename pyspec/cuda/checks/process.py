"""The process in which implementations are checked, as its parent holds it. No torch: one can be started before anything else is imported.

Such a child imports torch itself, which takes as long as it takes the parent; `begin` has both do so at once where a first start is likely.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from pyspec.cache import cache_root, n_cores

log = logging.getLogger(__name__)

TAIL = 200  # characters of the child's last words
MOST = 4  # that check at once
GPUS = Path("/dev/nvidiactl"), Path("/dev/kfd")  # one exists if there is a GPU: NVIDIA's, AMD's


_ready: list[Checker] = []
_taking = threading.Lock()


def begin() -> None:
    """Start children now on a first start: there is a GPU, and no verdict is kept yet."""
    if not any(path.exists() for path in GPUS) or any((cache_root() / "verdicts").glob("*.json")):
        return
    with _taking:
        while len(_ready) < max(1, min(MOST, n_cores() // 2)):
            _ready.append(Checker())


def take() -> Checker:
    """One that is ready, or a new one."""
    with _taking:
        while _ready:
            child = _ready.pop(0)
            if child.process.poll() is None:
                return child
            child.end()
    return Checker()


def let_go() -> None:
    """End the children that were not taken."""
    with _taking:
        while _ready:
            _ready.pop().end()


class Checker:
    """A running child: its lines as they come, None when it is gone."""

    def __init__(self) -> None:
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pyspec.cuda.check_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the parent, and says nothing about a kernel
        )
        self.lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="pyspec-probe", daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as out:
            for line in out:
                self.lines.put(line)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)  # its own exit status says more than that of a kill
        self.lines.put(None)

    def send(self, request: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone, which `lines` reports
            self.process.stdin.write(request)
            self.process.stdin.flush()

    def last_words(self) -> str:
        """How it ended, and the end of its output."""
        code = self.process.returncode
        if code is None:
            how = "it does not end"
        elif code < 0:
            how = f"killed by signal {-code}, {signal.strsignal(-code)}"
        else:
            how = f"exit status {code}"
        self.errors.seek(0)
        said = " ".join(self.errors.read().decode(errors="replace").split())[-TAIL:]
        return f"{how} ({said})" if said else how

    def end(self) -> None:
        """Kill it. A process that hangs in the driver may outlive this; it is not waited for."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # bytes left in the pipe of a child that is gone
            self.process.stdin.close()
        self.process.kill()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            log.warning("a child process that checked kernels does not end (pid %d)", self.process.pid)
