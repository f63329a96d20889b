"""One engine process from the parent's side: start it, exchange messages, end it."""

from __future__ import annotations

import itertools
import logging
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pyspec.config import EngineSettings
from pyspec.engine.children import how_ended, is_stopped
from pyspec.engine.messages import Fatal, Heartbeat, Link, Load, LoadRefused, Question, Ready, Reply
from pyspec.engine.process.ahead import END_S, started
from pyspec.errors import DeviceError, HostLost, ModelError, NoDevice, PyspecError, RankLost
from pyspec.gguf.reader import fingerprint
from pyspec.slot_action import SlotAction

log = logging.getLogger(__name__)


class EngineProcess:
    """A running child.

    received  when its last message came
    beat      its last heartbeat, and when it came
    answer    to Load
    fatal     its message before it ended itself
    """

    def __init__(
        self, command: Sequence[str], on_message: Callable[[object], None], on_end: Callable[[], None]
    ) -> None:
        """Start the process. `on_message` and `on_end` are called on a reader thread.

        The calling thread has to live as long as the process: Linux ends a child with the thread that started it.
        """
        self.process, ours = started(command)
        self.link, self._on_message, self._on_end = Link(ours), on_message, on_end
        self.began = self.received = time.monotonic()
        self.beat: tuple[Heartbeat, float] | None = None
        self.answer: Ready | LoadRefused | None = None
        self.fatal: Fatal | None = None
        self._asked: dict[int, Callable[[Any], None]] = {}
        self._numbers, self._is_over = itertools.count(), False
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="pyspec-engine-reader", daemon=True)
        self._reader.start()
        threading.Thread(target=self._write, name="pyspec-engine-writer", daemon=True).start()

    def send(self, message: object) -> None:
        """Queue a message, so that the sender does not wait for a process that does not read."""
        self._outbox.put(message)

    def ask(
        self,
        what: Literal["look", "park", "wake", "act"],
        on_reply: Callable[[Any], None],
        action: SlotAction | None = None,
    ) -> None:
        """Ask a question. `on_reply` is called once, with the answer (Reply), or None if the process ends before."""
        number = next(self._numbers)
        self._asked[number] = on_reply
        self.send(Question(number, what, action))
        if self._is_over:
            self._let_go()

    def _let_go(self) -> None:
        for number in list(self._asked):
            if (on_reply := self._asked.pop(number, None)) is not None:
                on_reply(None)

    def _write(self) -> None:
        with suppress(OSError):  # the process is gone, and the reader reports it
            while (message := self._outbox.get()) is not None:
                self.link.send(message)

    def _read(self) -> None:
        while (message := self.link.receive()) is not None:
            self.received = time.monotonic()
            if isinstance(message, Heartbeat):
                self.beat = message, self.received
            elif isinstance(message, Ready | LoadRefused):
                self.answer = message
            elif isinstance(message, Fatal):
                self.fatal = message
            elif isinstance(message, Reply):
                self._asked.pop(message.number)(message.answer)
                continue
            self._on_message(message)
        self._is_over = True
        self._let_go()
        self._on_end()

    @property
    def is_gone(self) -> bool:
        return self.process.poll() is not None or not self._reader.is_alive()

    @property
    def is_reader(self) -> bool:
        """This is the thread that reads the process's messages."""
        return threading.current_thread() is self._reader

    @property
    def is_stopped(self) -> bool:
        return is_stopped(self.process.pid)

    @property
    def was_killed(self) -> bool:
        """It was ended by a signal that no failure of its own raises."""
        return self.process.returncode in (-signal.SIGKILL, -signal.SIGTERM)

    def forgive(self, now: float) -> None:
        """Do not count its silence so far."""
        self.received = now
        self.beat = None if self.beat is None else (self.beat[0], now)

    def end(self) -> str:
        """End the process and return how it ended. Its last messages are read first."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(
                0 if self._reader.is_alive() else END_S
            )  # its own exit status says more than a kill
        was_gone = self.process.poll() is not None
        if not was_gone:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
        self._reader.join(0.5)
        self.link.close()
        self._outbox.put(None)
        self._reader.join(END_S)
        code = self.process.poll()
        if code is None:
            log.warning("the engine's process does not end (pid %d)", self.process.pid)
            return "it does not end"
        if not was_gone:
            return "it was killed"
        return how_ended(code)


# -- whether a process still works -----------------------------------------------------------------------------------
# Decides whether an engine process still works: how long a round may take, by the rounds before it, and the reason if it does not.

STOPPED_S = 2.0  # silence of a process that was stopped by a signal
HANG_FACTOR = 10.0  # a round hangs after this many times its expected duration
# and after at least this many seconds, with and without an expectation
HANG_S = {"cpu": (60.0, 600.0), "gpu": (5.0, 60.0)}
SILENT_S = 120.0  # seconds without a message between rounds
WINDOW_S = 600.0  # seconds for which a false alarm raises the limits
TICK_S = 0.05  # interval of the checks
LATE_S = 1.0  # a check that comes this late shows that this process did not run


class RoundPace:
    """Expected duration of a round, which heartbeats tell the watchdog: the longest so far, scaled up if the round has more rows than any
    before."""

    def __init__(self) -> None:
        self.longest, self.most_rows, self._rows = 0.0, 0, 1

    def begin(self, n_row: int) -> None:
        """A round of `n_row` rows starts."""
        self._rows = n_row

    def end(self, seconds: float) -> None:
        """The round took this long."""
        self.longest, self.most_rows = max(self.longest, seconds), max(self.most_rows, self._rows)

    @property
    def expected(self) -> float:
        """Seconds of the current round; 0: unknown."""
        return self.longest * max(1.0, self._rows / self.most_rows) if self.most_rows else 0.0


@dataclass(frozen=True)
class EngineEnd:
    """Why an engine process is not used any more. An empty `why`: its exit status says it."""

    why: str
    from_outside: bool = False  # a signal from outside killed or stopped it, or the host was late
    kernels: tuple[str, ...] = ()  # modules of the op that failed
    of_device: bool = False


class Watchdog:
    """Watches one engine process after another. After a false alarm it waits longer for the next round."""

    def __init__(self, hang_timeout: float) -> None:
        self._hang_timeout = hang_timeout
        self._alarms: list[float] = []
        self._asked = time.monotonic()

    def look(self, child: EngineProcess, device: str) -> EngineEnd | None:
        """Returns why the process is given up; None while it works, or may work."""
        now = time.monotonic()
        if now - self._asked > LATE_S:  # the machine slept, for example
            child.forgive(now)
        self._asked = now
        silent = now - child.received
        if silent > STOPPED_S and child.is_stopped:
            return EngineEnd(f"its process has been stopped for {silent:.1f} s", from_outside=True)
        beat, at = child.beat or (Heartbeat(), child.received)
        if not beat.step_age:
            return EngineEnd(f"it has been silent for {silent:.0f} s") if silent > SILENT_S else None
        age, limit = beat.step_age + now - at, self._limit(beat, device)
        if age <= limit:
            return None
        self._alarms.append(now)
        why = f"a round has been under way for {age:.1f} s, more than {limit:.1f}"
        return EngineEnd(why, kernels=beat.kernels, of_device=True)

    def _limit(self, beat: Heartbeat, device: str) -> float:
        """Seconds a round may take."""
        if self._hang_timeout:
            return self._hang_timeout
        least, unknown = HANG_S["cpu" if device.startswith("cpu") else "gpu"]
        limit = max(least, HANG_FACTOR * beat.expected) if beat.expected else unknown
        return limit * 2.0 ** sum(time.monotonic() - at < WINDOW_S for at in self._alarms)


# -- starts ----------------------------------------------------------------------------------------------------------
# Starts engine processes, without kernels that failed before.


# a later load hangs after this many times the first load, and at least this many seconds
LOAD_FACTOR, LOAD_S = 5.0, 300.0
EXAMINE_S = 600.0  # two device failures within this time: the next engine is examined


class Launcher:
    """Starts engine processes and keeps what later ones need. Used on one thread, which outlives them.

    demoted      modules of ops whose implementations failed while they ran
    is_examined  the last process runs every kernel alone
    """

    def __init__(
        self,
        path: Path,
        settings: EngineSettings,
        command: Sequence[str],
        on_message: Callable[[object], None],
        on_end: Callable[[], None],
    ) -> None:
        self.path, self.settings = path, settings
        self.demoted: set[str] = set(settings.demoted)
        self.is_examined = False
        self._new = lambda: EngineProcess(command, on_message, on_end)
        self._failures: list[float] = []  # times of device failures
        self._load_s = 0.0  # seconds of the first load
        self._ctx = 0  # context length of the first engine: a later one may see less free memory while the old one still frees its own
        self._files: dict[Path, str] = {}  # fingerprints of what the first engine has loaded

    def launch(
        self, news: threading.Condition, is_closing: Callable[[], bool]
    ) -> EngineProcess | PyspecError:
        """Start and load an engine; return it, or the reason for the failure. `news` is notified of each message."""
        for file, known in self._files.items() if self._load_s else ():
            if _contents(file) not in (known, ""):
                return ModelError(f"{file} is another file than the one that was loaded")
        self.is_examined = self._wants_examination()
        if self.is_examined:
            log.warning(
                "the engine failed twice: for a while it is a slow one that finds out whether a kernel does it"
            )
        try:
            child = self._new()
        except OSError as e:
            return DeviceError(f"no process can be started for the engine: {e}")
        settings = replace(
            self.settings, demoted=tuple(sorted(self.demoted)), ctx=self.settings.ctx or self._ctx
        )
        child.send(
            Load(self.path, settings, logging.getLogger("pyspec").getEffectiveLevel(), self.is_examined)
        )
        if not self._load_s:  # while it loads; drafters change no text
            files = [file for file in (self.path, settings.mmproj) if file is not None]
            self._files = {file: known for file in files if (known := _contents(file))}
        limit = max(LOAD_S, LOAD_FACTOR * self._load_s) if self._load_s else float("inf")
        with news:
            while child.answer is None and not child.is_gone and not is_closing():
                if time.monotonic() - child.began > limit:
                    break
                news.wait(TICK_S)
        if isinstance(
            child.answer, Ready
        ):  # checked again: Ready may have been the process's last message
            self._load_s = self._load_s or time.monotonic() - child.began
            self._ctx = self._ctx or child.answer.info.n_ctx
            return child
        return self._give_up(child)

    def _give_up(self, child: EngineProcess) -> PyspecError:
        how = child.end()
        if isinstance(child.answer, LoadRefused):
            error, kernels = child.answer.error, child.answer.kernels
        else:
            error = DeviceError(f"the engine's process ended while it was loading: {how}")
            kernels = child.beat[0].kernels if child.beat is not None else ()
        # the failing kernel is unknown if a rank ended
        self.learn(
            kernels,
            of_device=isinstance(error, DeviceError)
            and not isinstance(error, RankLost | HostLost | NoDevice),
        )
        return error

    def learn(self, kernels: Sequence[str], *, of_device: bool) -> bool:
        """Remember a failure, and demote the kernels that it names. Returns False if none is new."""
        if of_device:
            self._failures.append(time.monotonic())
        new = set(kernels) - self.demoted
        if new:
            log.error("not used any more before the next start: %s", ", ".join(sorted(new)))
            self.demoted |= new
            self._failures.clear()
        return bool(new)

    def _wants_examination(self) -> bool:
        """Two device failures in a short time, of unknown cause."""
        now = time.monotonic()
        self._failures = [at for at in self._failures if now - at < EXAMINE_S]
        if len(self._failures) < 2:
            return False
        self._failures.clear()
        return True


def _contents(file: Path) -> str:
    """A name for what is in a file; "" if it can not be read, which its load says."""
    with suppress(OSError, PyspecError):
        return fingerprint(file)
    return ""
