"""Starting engine processes: with a spare that has imported what it needs, and without the kernels that failed before."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pyspec.config import EngineSettings
from pyspec.engine.messages import Load, LoadRefused, Ready
from pyspec.engine.process.process import EngineProcess
from pyspec.engine.process.watchdog import TICK_S
from pyspec.errors import DeviceError, NoDevice, PyspecError, RankLost

log = logging.getLogger(__name__)

LOAD_FACTOR, LOAD_S = 5.0, 300.0  # loading again hangs behind so many times the first load, and not before
EXAMINE_S = 600.0  # two failures of the device within this time: the next engine is examined


class Launcher:
    """What one engine process leaves for the next. Used on one thread, which lives as long as they do.

    demoted      modules of ops whose implementations failed while they ran
    is_examined  the process that was launched last runs every kernel alone
    keeps_spare  None: decided when it is known where the engine runs
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
        self.keeps_spare: bool | None = None
        self.spare: EngineProcess | None = None
        self._new = lambda: EngineProcess(command, on_message, on_end)
        self._failures: list[float] = []  # of the device
        self._load_s = 0.0  # what the first load took
        self._ctx = (
            0  # what it found room for: requests go on in the next engine, though the memory of the last may be late
        )

    def launch(self, news: threading.Condition, is_closing: Callable[[], bool]) -> EngineProcess | PyspecError:
        """An engine that is loaded, or the reason why it can not be. `news` is notified when a process says something."""
        self.is_examined = self._wants_examination()
        if self.is_examined:
            log.warning("the engine failed twice: for a while it is a slow one that finds out whether a kernel does it")
        try:
            child = self._process()
        except OSError as e:
            return DeviceError(f"no process can be started for the engine: {e}")
        settings = replace(self.settings, demoted=tuple(sorted(self.demoted)), ctx=self.settings.ctx or self._ctx)
        child.send(Load(self.path, settings, logging.getLogger("pyspec").getEffectiveLevel(), self.is_examined))
        limit = max(LOAD_S, LOAD_FACTOR * self._load_s) if self._load_s else float("inf")
        with news:
            while child.answer is None and not child.is_gone and not is_closing():
                if time.monotonic() - child.began > limit:
                    break
                news.wait(TICK_S)
        if isinstance(child.answer, Ready):  # looked at again: it may have been the last that the process said
            self._load_s = self._load_s or time.monotonic() - child.began
            self._ctx = self._ctx or child.answer.info.n_ctx
            if self.keeps_spare is None:
                self.keeps_spare = not child.answer.info.device.startswith("cpu")
            return child
        return self._give_up(child)

    def _give_up(self, child: EngineProcess) -> PyspecError:
        how = child.end()
        if isinstance(child.answer, LoadRefused):
            error, kernels = child.answer.error, child.answer.kernels
        else:
            error = DeviceError(f"the engine's process ended while it was loading: {how}")
            kernels = child.beat[0].kernels if child.beat is not None else ()
        # whichever rank ended, nobody knows by what
        self.learn(kernels, of_device=isinstance(error, DeviceError) and not isinstance(error, RankLost | NoDevice))
        return error

    def learn(self, kernels: Sequence[str], *, of_device: bool) -> bool:
        """An engine failed: do without the kernels that it names. False if that changes nothing."""
        if of_device:
            self._failures.append(time.monotonic())
        new = set(kernels) - self.demoted
        if new:
            log.error("not used any more before the next start: %s", ", ".join(sorted(new)))
            self.demoted |= new
            self._failures.clear()
        return bool(new)

    def keep_spare(self) -> None:
        """Importing takes seconds of a pause. Only beside a GPU: elsewhere what a spare takes is the memory of the model."""
        if self.spare is None and self.keeps_spare:
            with suppress(OSError):
                self.spare = self._new()

    def close(self) -> None:
        """Let the spare go."""
        if self.spare is not None:
            self.spare.end()

    def _process(self) -> EngineProcess:
        spare, self.spare = self.spare, None
        if spare is not None and not spare.is_gone:
            spare.began = spare.received = time.monotonic()
            return spare
        return self._new()

    def _wants_examination(self) -> bool:
        """Engines failed twice in a short time, maybe by the device, and nobody knows at what."""
        now = time.monotonic()
        self._failures = [at for at in self._failures if now - at < EXAMINE_S]
        if len(self._failures) < 2:
            return False
        self._failures.clear()
        return True
