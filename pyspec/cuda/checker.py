"""Finding the kernel that ends a process: in a child before its first use, and in an examined engine after a crash.

Checks run in a child process: an implementation that crashes, hangs or poisons the GPU costs the child. This is the parent's side, which
knows candidates by name only; check_child.py is the other. A child starts with the first check, runs one after another, reports each
stage, and exits when it is idle for a while. If it dies, the candidate under check is refused, and a new child goes on with the next. No
torch here: children import it themselves, and `begin` starts them before this process does.

Work on a GPU fails later than it was launched, and nothing says which kernel it was. An engine that is started after such a failure may be
an examined one (`EXAMINATION`): it launches one by one, waits for each, and notes whose it is. It is slow, and if it fails or hangs the
note names the op.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

from pyspec.cache import cache_root, n_cores

log = logging.getLogger(__name__)

# How long a child may be at each, compiling included
LIMITS_S = {"start": 120.0, "binding": 300.0, "check": 60.0}
TAIL = 200  # characters of a child's last output
MOST = 4  # children that check at once
OPS = "pyspec.cuda.ops."
GPUS = Path("/dev/nvidiactl"), Path("/dev/kfd")  # one exists if there is a GPU: NVIDIA's, AMD's


@dataclass(frozen=True, slots=True)
class Verdict:
    """`refusal` is None for an implementation that may be used. `lasting`: the next check would find the same. `choice`: result of `tune`."""

    refusal: str | None
    lasting: bool = True
    choice: str = ""


def sentence(error: BaseException) -> str:
    """An exception in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


class Child:
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
        threading.Thread(target=self._read, name="pyspec-checker", daemon=True).start()

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


class Checker:
    """Checks by one child at a time, which it replaces. Safe to use from several threads.

    stays  whether the child waits for the next check, and keeps its memory on the GPU meanwhile
    """

    def __init__(self, limits_s: dict[str, float]) -> None:
        self.limits_s, self.stays = limits_s, True
        self._child: Child | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start a child for checks to come, because it takes seconds to start."""
        with self._lock:
            self._child = self._child or take()

    def check(self, home: str, impl: str, spec: object) -> Verdict:
        """Have `impl` of the op at `home` ("module:name") checked for `spec`."""
        try:
            request = base64.b64encode(pickle.dumps((home, impl, spec))) + b"\n"
        except (pickle.PicklingError, AttributeError, TypeError) as e:
            return Verdict(f"could not be checked: {sentence(e)}", lasting=False)
        with self._lock:
            why = ""
            for _ in range(2):  # an idle child may exit just before the request
                child = self._child = self._child or take()
                child.send(request)
                found, why = self._listen(child)
                if not self.stays:
                    self._drop()
                if found is not None:
                    return found
            return Verdict(f"could not be checked: {why}", lasting=False)

    def _listen(self, child: Child) -> tuple[Verdict | None, str]:
        """The child's verdict; None and the reason if it never came to this request."""
        at = "start"
        while True:
            try:
                line = child.lines.get(timeout=self.limits_s[at])
            except queue.Empty:
                self._drop()
                late = f"its {at} took more than {self.limits_s[at]:.0f} s"
                return (None, late) if at == "start" else (Verdict(late), "")
            if line is None:
                self._drop()
                why = child.last_words()
                if at == "start":
                    return None, why
                # By a user or the kernel's out-of-memory killer
                killed = child.process.returncode == -signal.SIGKILL
                return Verdict(f"its {at} ended the process: {why}", lasting=not killed), ""
            answer = json.loads(line)
            if "at" in answer:
                at = answer["at"]
                continue
            if answer["spoilt"]:
                self._drop()
            return Verdict(answer["refusal"], answer["lasting"], answer["choice"]), ""

    def _drop(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def close(self) -> None:
        with self._lock:
            self._drop()


@cache
def shared() -> Checker:
    """The one of this process."""
    return Checker(LIMITS_S)


def close() -> None:
    """Let all children go now instead of when they have been idle."""
    shared().close()
    with _taking:
        while _ready:
            _ready.pop().end()


# -- children that were started ahead -----------------------------------------------------------------------------------

_ready: list[Child] = []
_taking = threading.Lock()


def begin() -> None:
    """Start children now on a first start: there is a GPU, and no verdict is kept yet."""
    if not any(path.exists() for path in GPUS) or any((cache_root() / "verdicts").glob("*.json")):
        return
    with _taking:
        while len(_ready) < max(1, min(MOST, n_cores() // 2)):
            _ready.append(Child())


def take() -> Child:
    """One that is ready, or a new one."""
    with _taking:
        while _ready:
            child = _ready.pop(0)
            if child.process.poll() is None:
                return child
            child.end()
    return Child()


# -- examined engines ---------------------------------------------------------------------------------------------------


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
