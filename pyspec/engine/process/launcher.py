"""Starts engine processes, without kernels that failed before."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pyspec.config import EngineSettings
from pyspec.engine.messages import Load, LoadRefused, Ready
from pyspec.engine.process.process import EngineProcess
from pyspec.engine.process.watchdog import TICK_S
from pyspec.errors import DeviceError, NoDevice, PyspecError, RankLost

log = logging.getLogger(__name__)

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

    def launch(
        self, news: threading.Condition, is_closing: Callable[[], bool]
    ) -> EngineProcess | PyspecError:
        """Start and load an engine; return it, or the reason for the failure. `news` is notified of each message."""
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
            of_device=isinstance(error, DeviceError) and not isinstance(error, RankLost | NoDevice),
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
