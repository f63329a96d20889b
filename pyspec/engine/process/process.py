"""One engine process from the parent's side: start it, exchange messages, end it."""

from __future__ import annotations

import logging
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from pyspec.engine.messages import Fatal, Heartbeat, Link, LoadRefused, Ready
from pyspec.engine.process.ahead import END_S, started

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
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="pyspec-engine-reader", daemon=True)
        self._reader.start()
        threading.Thread(target=self._write, name="pyspec-engine-writer", daemon=True).start()

    def send(self, message: object) -> None:
        """Queue a message, so that the sender does not wait for a process that does not read."""
        self._outbox.put(message)

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
            self._on_message(message)
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
        """The process was stopped by SIGSTOP; tracing is another state."""
        with suppress(OSError):
            return (
                Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
            )
        return False

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
        return f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit status {code}"
