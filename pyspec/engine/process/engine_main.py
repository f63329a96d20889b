"""The engine process: loads a model, runs an EngineCore, and sends events and heartbeats. It ends with its parent.

Nothing is decided here. A failure of the device is reported and ends the process; the supervisor continues the requests in the
next process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import linecache
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspec import progress
from pyspec.config import EngineSettings
from pyspec.cuda import checker
from pyspec.engine.messages import (
    Blocks,
    Cancel,
    Events,
    Fatal,
    Heartbeat,
    Link,
    Load,
    LoadRefused,
    LoadStage,
    LogLine,
    Looked,
    Question,
    Ready,
    Reply,
    Submit,
    pack,
    portable,
)
from pyspec.errors import EngineBug, PyspecError
from pyspec.gguf import GGUFFile, open_gguf
from pyspec.heap import unmap_idle_pages
from pyspec.request import Event, Failed
from pyspec.slots.blocks import BlockChange
from pyspec.streams import fill_in

if TYPE_CHECKING:
    from pyspec.engine.process.core import Due, EngineCore

# -- what needs no torch ---------------------------------------------------------------------------------------------
# The part of a load that needs no torch, on a thread beside torch's import: torch's library, the model's head, weights for a CPU.
#
# Nothing is decided here. A step that fails is done again by the load, which reports it.

MEMINFO = Path("/proc/meminfo")
SHARE = 0.5  # of the free memory: a larger file is read after its plan, which may refuse it
OF_DEVICES = ("cuda", "hip", "xpu")


def first_message(receive: Callable[[], object]) -> tuple[object, GGUFFile | None]:
    """Receive the first message, which is None if the other side is gone, and begin with what it asks for: the model's file, opened; None if it is
    left to the load."""
    library = cpu_library()
    if library is not None:
        with suppress(OSError):
            ctypes.CDLL(str(library))  # without the interpreter's lock; torch's import then finds it
    message = receive()
    if isinstance(message, Load):
        with suppress(OSError, PyspecError):
            return message, begun(message.path, message.settings, library is not None)
    return message, None


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


log = logging.getLogger("pyspec.engine.process.engine_main")  # this file runs as the main module

BEAT_S = 0.2
STAGE_S = 0.1  # between messages about the load's progress
SWITCH_S = 1e-4  # how soon the engine's thread gets the GIL back (see server/http/serve.py)
IMPORTS = ("pyspec.text.tokenizer", "pyspec.text.template", "pyspec.engine.process.core")
"""Modules that a load needs, imported before it is asked for: those without torch first, while another thread loads its library."""
FATAL = 70  # exit status after Fatal was sent
PR_SET_PDEATHSIG = 1


class EngineMain:
    """The process's end of the link, and its core."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.core: EngineCore | None = None
        self.is_over = threading.Event()
        self._stage_due = 0.0

    def run(self) -> None:
        """Run until the parent is gone."""
        began = time.perf_counter()
        checker.begin()  # its processes import while this one does
        gc.disable()  # a load makes a million objects that stay
        with ThreadPoolExecutor(1, "pyspec-early") as beside:
            first = beside.submit(first_message, self.link.receive)
            for name in IMPORTS:
                import_module(name)
            message, file = first.result()
        if not isinstance(message, Load):
            return
        log_to(self.link, message.log_level)
        log.info("imports: %.1f s", time.perf_counter() - began)
        if not self.load(message, file):
            return
        del file, first
        gc.freeze()
        gc.enable()
        assert self.core is not None
        linecache.clearcache()  # importing torch reads sources that tracebacks alone would want
        if self.core.info.device == "cpu":
            unmap_idle_pages()
            self.core.on_rest = unmap_idle_pages
        while (message := self.link.receive()) is not None:
            if isinstance(message, Submit):
                self.submit(self.core, message)
            elif isinstance(message, Cancel):
                self.core.cancel(message.name)
            elif isinstance(message, Question):
                self.answer(self.core, message)

    def load(self, message: Load, file: GGUFFile | None = None) -> bool:
        """Load a model and send Ready, or the reason for a failure. Returns False if nothing was loaded.

        file  the model, if it is open already
        """
        from pyspec.cuda.checker import EXAMINATION
        from pyspec.engine.process.core import EngineCore

        settings = message.settings
        if message.examined:  # a graph launches all its kernels at once
            EXAMINATION.is_on, settings = True, replace(settings, plain_loop=True)
        threading.Thread(target=self.beat, name="pyspec-heartbeat", daemon=True).start()
        try:
            with progress.listening(self.send_stage):
                self.core = EngineCore.load(
                    message.path,
                    settings,
                    hand_over=self.hand_over,
                    on_death=self.die,
                    on_blocks=self.hand_blocks if settings.kv_events else None,
                    file=file,
                )
        except PyspecError as e:
            self.link.send(LoadRefused(portable(e), EXAMINATION.under_way))
            return False
        except Exception as e:
            from pyspec.device.worker import failure_of

            log.exception("loading failed")
            self.link.send(LoadRefused(failure_of(e, "loading failed"), EXAMINATION.under_way))
            return False
        self.link.send(Ready(self.core.info))
        return True

    def send_stage(self, stage: str, fraction: float) -> None:
        """Send the load's progress: at most ten times a second, and where a stage begins or ends."""
        now = time.monotonic()
        if fraction in (0.0, 1.0) or now >= self._stage_due:
            self._stage_due = now + STAGE_S
            self.link.send(LoadStage(stage, fraction))

    def submit(self, core: EngineCore, message: Submit) -> None:
        """Queue a request; a refusal is its last event."""
        try:
            core.submit(message.request, _ignore, name=message.name, seed=message.seed)
        except PyspecError as e:
            self.link.send(Events([pack(Failed(message.name, e))]))

    def answer(self, core: EngineCore, question: Question) -> None:
        """Answer a question. Parking and waking have a thread of their own."""
        tell = partial(self.tell, question.number)
        if question.what == "look":
            tell(Looked(core.slots(), core.metrics()))
        elif question.action is not None:
            core.act_on_slot(question.action, tell)
        else:
            work = core.park if question.what == "park" else core.wake
            threading.Thread(
                target=self.rest, args=(work, tell), name="pyspec-rest", daemon=True
            ).start()

    def tell(self, number: int, answer: Any) -> None:
        """Send the answer to a question. Called on any thread."""
        with suppress(OSError):
            self.link.send(
                Reply(number, portable(answer) if isinstance(answer, PyspecError) else answer)
            )

    def rest(self, work: Callable[[], None], tell: Callable[[Any], None]) -> None:
        """Park or wake, and send what came of it."""
        try:
            work()
            tell(True)
        except PyspecError as e:
            tell(e)
        except Exception as e:
            log.exception("parking or waking failed")
            tell(EngineBug(f"parking or waking failed: {type(e).__name__}: {e}"))

    def hand_over(self, due: Due) -> None:
        """Send a round's events as one message. Called on the engine's thread."""
        with suppress(OSError):  # the parent is gone, and the main thread sees that
            self.link.send(Events([pack(event) for _, event in due]))

    def hand_blocks(self, changes: Sequence[BlockChange]) -> None:
        """Send changes of the prefix cache. Called on the engine's thread."""
        with suppress(OSError):
            self.link.send(Blocks(changes))

    def die(self, error: PyspecError) -> None:
        """Called on the engine's thread. End the process before its listeners see the error, because the next process serves them."""
        from pyspec.cuda.checker import EXAMINATION

        with suppress(OSError):
            self.link.send(Fatal(portable(error), EXAMINATION.under_way))
        logging.shutdown()
        os._exit(FATAL)

    def beat(self) -> None:
        """Send several heartbeats a second, with the age of the current round."""
        from pyspec.cuda.checker import EXAMINATION

        n = 0
        with suppress(OSError):
            while not self.is_over.wait(BEAT_S):
                core, n = self.core, n + 1
                if core is None:
                    self.link.send(Heartbeat(kernels=EXAMINATION.under_way))
                    continue
                began = core.step_began
                age = time.monotonic() - began if began else 0.0
                # metrics survive this process in the parent; not every beat needs them
                metrics = core.metrics() if age or n % 5 == 0 else None
                self.link.send(Heartbeat(age, core.pace.expected, metrics, EXAMINATION.under_way))


def _ignore(event: Event) -> None:
    pass


class _ToParent(logging.Handler):
    def __init__(self, link: Link) -> None:
        super().__init__()
        self.link = link
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            fields = getattr(record, "fields", None)
            self.link.send(
                LogLine(record.name, record.levelno, self.format(record), record.created, fields)
            )


def log_to(link: Link, level: int) -> None:
    """Send this process's log lines to its parent."""
    logging.basicConfig(level=logging.WARNING, handlers=[_ToParent(link)], force=True)
    logging.getLogger("pyspec").setLevel(level)


def settle(descriptor: int) -> socket.socket:
    """The first steps of a process that `start` has started. Returns its end of the link."""
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # a service manager signals every process; the parent decides when this one ends
        signal.signal(sig, signal.SIG_IGN)
    fill_in()  # a daemon may have closed the standard streams
    os.dup2(2, 1)
    with suppress(ValueError, OSError):  # a core dump of a model's memory takes long
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable()
    return socket.socket(fileno=descriptor)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process with its parent: a closed link alone is seen only by a thread that reads it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def main(descriptor: int) -> None:
    """Run the process. `descriptor` is its end of the link."""
    parent = os.getppid()
    die_with_parent(parent)
    sys.setswitchinterval(SWITCH_S)
    child = EngineMain(Link(settle(descriptor)))
    with suppress(ConnectionError):  # the parent is gone
        child.run()
    child.is_over.set()
    logging.shutdown()
    os._exit(0)  # other threads may still run


if __name__ == "__main__":
    main(int(sys.argv[1]))
