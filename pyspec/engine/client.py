"""The supervisor: keeps an engine process running and hears it; one that dies or hangs is replaced, and requests go on.

It knows of every request what was delivered (record.py). A new engine gets the same requests, each with its tokens so far, so
clients see a pause. Nothing here knows torch: a program that only talks to an isolated engine stays small.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from pyspec.config import EngineSettings
from pyspec.engine.process import COMMAND, EngineProcess
from pyspec.engine.record import Record, Sink
from pyspec.engine.wire import (
    Cancel,
    Events,
    Fatal,
    Heartbeat,
    Load,
    LogLine,
    Look,
    Looked,
    Ready,
    Refused,
    unpack,
)
from pyspec.errors import DeviceError, PyspecError, QueueFull, SlotError, Unavailable
from pyspec.gguf import open_gguf
from pyspec.request import Done, EngineInfo, Event, Failed, Metrics, Request, SlotInfo
from pyspec.sample.noise import resolve_seed
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TICK_S = 0.05  # how often the supervisor looks; what the engine says is heard at once
STOPPED_S = 2.0  # silence of a process that somebody stopped
HANG_FACTOR = 10.0  # a round hangs when it has taken so many times what it should, by those before it,
HANG_S = {"cpu": (60.0, 600.0), "gpu": (5.0, 60.0)}  # but so many seconds at least; and while there was none to go by
SILENT_S = 120.0  # without any word between rounds
LOAD_FACTOR, LOAD_S = 5.0, 300.0  # loading again hangs behind so many times the first load, and not before
BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)  # before each load after one that failed
N_LOAD, N_CRASH = 3, 3  # failed loads after which requests are not kept waiting; crashes of one request
EXAMINE_S = 600.0  # two failures of the device within this time: the next engine is examined,
EXAMINED_S = 120.0  # for so long, because it is slow
LOOK_S = 1.0
CLOSE_S = 5.0

GAUGES = {
    "requests_processing", "requests_queued", "n_tokens_max", "pages_used", "pages_total", "pages_cached", "states",
    "states_device_bytes", "states_host_bytes", "seconds_since_step",
}  # fmt: skip
"""Of Metrics: what is of the engine that runs now; all else is counted through."""


@dataclass(frozen=True)
class End:
    """Why an engine process is not used any more."""

    why: str
    from_outside: bool = False  # somebody killed or stopped it
    kernels: tuple[str, ...] = ()  # modules of the op that failed
    of_device: bool = False
    hung: bool = False


class Supervisor:
    """A Core whose engine is another process. Safe to call from any thread."""

    def __init__(self, path: Path, settings: EngineSettings, *, command: Sequence[str] = ()) -> None:
        self.path, self.settings, self.command = path, settings, command or COMMAND
        self.n_restart = self.n_replayed = 0
        self._info: EngineInfo | None = None
        self._state = "loading"  # then "ok", "recovering", "stopped"
        self._error: PyspecError | None = None  # why it is stopped
        self._records: dict[str, Record] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Condition()
        self._child: EngineProcess | None = None  # the one that takes requests
        self._held: list[Record] = []  # suspects whose turn has not come
        self._trial: Record | None = None  # the suspect that runs
        self._fatal: Fatal | None = None
        self._answer: Ready | Refused | None = None
        self._looked: dict[int, Looked | None] = {}
        self._is_examined = False
        self._lost_at = 0.0  # when the last engine was
        self._past, self._now = (
            Metrics(),
            Metrics(),
        )  # counted by engines that are gone, and by this one when it last told
        self._own_failed = self._own_cancelled = 0
        self._demoted: set[str] = set(settings.demoted)
        self._device_failures: list[float] = []
        self._hang_times: list[float] = []
        self._load_s = 0.0
        self._closing = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._live, name="pyspec-supervisor", daemon=True)
        self._thread.start()

    # -- for callers ---------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "wait() comes first"
        return self._info

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_metadata(open_gguf(self.path).metadata)

    @cached_property
    def template(self) -> ChatTemplate | None:
        return ChatTemplate.from_metadata(open_gguf(self.path).metadata)

    def wait(self) -> None:
        """Until it is loaded. Raises what it can not be loaded for."""
        with self._lock:
            while self._info is None and self._error is None:
                self._lock.wait()
            if self._info is None and self._error is not None:
                raise self._error

    def submit(self, request: Request, sink: Sink) -> str:
        """See Engine.submit. While the engine is replaced requests are taken, and wait."""
        if os.getpid() != self._pid:
            raise Unavailable(f"this engine belongs to process {self._pid}; load one in process {os.getpid()}")
        seed = resolve_seed(request.params.seed)
        with self._lock:
            if self._state == "stopped" or self._closing:
                raise Unavailable(f"the engine has stopped: {self._error or 'the engine was closed'}")
            waiting = sum(not record.has_begun for record in self._records.values())
            if waiting >= self.settings.queue_limit:
                raise QueueFull(waiting)
            record = Record(f"r{next(self._ids)}", request, seed, sink)
            self._records[record.name] = record
            if self._child is not None:
                self._child.send(record.submit())
        return record.name

    def cancel(self, name: str) -> None:
        """See Engine.cancel. Without an engine to ask, the request ends here."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            record = self._records.get(name)
            if record is None:
                return
            record.cancelled = True
            if self._child is not None and record not in self._held:
                self._child.send(Cancel(name))
                return
        self._drop_cancelled()

    def alive(self) -> bool:
        return self._state in ("ok", "recovering")

    def state(self) -> str:
        return self._state

    def slots(self) -> list[SlotInfo]:
        looked = self._look()
        if looked is not None:
            return list(looked.slots)
        return [SlotInfo(slot=i, n_ctx=self.info.n_ctx, is_processing=False) for i in range(self.info.n_slot)]

    def metrics(self) -> Metrics:
        looked = self._look()
        now = self._now if looked is None else looked.metrics
        with self._lock:
            waiting = sum(not record.in_slot for record in self._records.values())
            own = {"requests_failed": self._own_failed, "requests_cancelled": self._own_cancelled}
        total = _sum(self._past, now)
        beat = self._child.beat if self._child is not None else None
        silent = time.monotonic() - beat[1] if beat is not None and looked is None else 0.0
        return replace(
            total,
            requests_queued=waiting,
            restarts=self.n_restart,
            tokens_replayed=self.n_replayed,
            seconds_since_step=max(now.seconds_since_step, silent if waiting or now.requests_processing else 0.0),
            **{name: getattr(total, name) + n for name, n in own.items()},
        )

    def close(self, limit_s: float = CLOSE_S) -> bool:
        """End the process, whatever it is at; running requests fail with Unavailable."""
        if os.getpid() != self._pid:
            return True
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(limit_s + CLOSE_S)
        return not self._thread.is_alive()

    def _look(self) -> Looked | None:
        """What the engine says of itself now; None if it does not answer, or a listener asks, who is in the answer's way."""
        with self._lock:
            child, number = self._child, next(self._ids)
            if child is None or child.is_reader or time.monotonic() - child.heard > LOOK_S:
                return None
            self._looked[number] = None
            child.send(Look(number))
            self._lock.wait_for(lambda: self._looked[number] or self._child is not child, LOOK_S)
            return self._looked.pop(number)

    # -- what the engine says, on the thread that reads ------------------------------------------------------------

    def _hear(self, child: EngineProcess, message: object) -> None:
        if isinstance(message, Events):
            for packed in message.packed:
                self._tell(unpack(packed))
        elif isinstance(message, Heartbeat):
            self._now = message.metrics or self._now
        elif isinstance(message, LogLine):
            _relay(message)
        elif isinstance(message, Looked):
            with self._lock:
                self._now = message.metrics
                if message.number in self._looked:  # else it comes too late for whoever asked
                    self._looked[message.number] = message
                self._lock.notify_all()
        else:
            with self._lock:
                if isinstance(message, Fatal):
                    self._fatal = message
                elif isinstance(message, Ready | Refused):
                    self._answer = message
                self._lock.notify_all()

    def _gone(self) -> None:
        with self._lock:
            self._lock.notify_all()

    def _tell(self, event: Event) -> None:
        record = self._records.get(event.request)
        if record is None:
            return
        if (told := record.hear(event)) is not None:
            self._pass_on(record, told)
        if record is self._trial and (isinstance(event, Done | Failed) or record.is_past_its_crash):
            record.crashes.clear()
            self._next_trial()

    def _pass_on(self, record: Record, event: Event) -> None:
        """A listener is the caller's code: its failure ends its own request, whatever it raises."""
        if isinstance(event, Done | Failed):
            self._records.pop(record.name, None)
        try:
            record.sink(event)
        except BaseException:
            log.exception("the listener of request %s failed", record.name)
            self.cancel(record.name)

    def _drop_cancelled(self) -> None:
        """End those that no engine knows of."""
        with self._lock:
            child = self._child
            known = [] if child is None else [r for r in self._records.values() if r not in self._held]
            gone = [r for r in self._records.values() if r.cancelled and r not in known]
            self._held = [r for r in self._held if r not in gone]
            self._own_cancelled += len(gone)
        for record in gone:
            self._pass_on(record, record.cancelled_event())

    def _fail(self, records: Sequence[Record], error: PyspecError) -> None:
        for record in records:
            self._own_failed += record.name in self._records
            self._pass_on(record, Failed(record.name, error))

    # -- the life of engines, on the supervisor's thread -----------------------------------------------------------

    def _live(self) -> None:
        try:
            self._replace_engines()
        except BaseException as e:  # nobody above would hear of it
            log.exception("the supervisor stops")
            self._error = PyspecError(f"the supervisor failed: {type(e).__name__}: {e}")
        self._stop()

    def _replace_engines(self) -> None:
        """One engine after another, until it is closed or the first one can not be loaded."""
        n_failed = 0
        while not self._closing:
            self._pause(BACKOFF_S[min(n_failed, len(BACKOFF_S) - 1)])
            n_demoted, child = len(self._demoted), self._start()
            if isinstance(child, EngineProcess):
                n_failed = 0
                self._bury(child, self._watch(child))
            elif not self._closing:
                n_failed = n_failed + 1 if n_demoted == len(self._demoted) else 0
                if not self._survives(child, n_failed):
                    return

    def _pause(self, seconds: float) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._closing, seconds)

    def _survives(self, error: PyspecError, n_failed: int) -> bool:
        """A load failed: try again, with patience. What the first load of all fails with is the caller's to mend."""
        if self._info is None and (not isinstance(error, DeviceError) or n_failed >= N_LOAD):
            self._error = error
            return False
        log.error("the engine could not be loaded (%s); trying again", error)
        if n_failed >= N_LOAD and self._info is not None:
            with self._lock:
                self._state, self._error = "stopped", error
                lost = list(self._records.values())
            self._fail(lost, Unavailable(f"the engine failed and could not be loaded again: {error}"))
        return True

    def _start(self) -> EngineProcess | PyspecError:
        """Load an engine, which takes requests when this returns; or the reason why not."""
        settings = replace(self.settings, demoted=tuple(sorted(self._demoted)))
        self._is_examined = self._wants_examination()
        if self._is_examined:
            log.warning(
                "the device failed twice: for a while the engine is a slow one that finds out which kernel it is"
            )
        with self._lock:
            self._answer = self._fatal = None
        try:
            child = EngineProcess(self.command, self._hear, self._gone)
        except OSError as e:
            return DeviceError(f"no process can be started for the engine: {e}")
        child.send(Load(self.path, settings, logging.getLogger("pyspec").getEffectiveLevel(), self._is_examined))
        limit = max(LOAD_S, LOAD_FACTOR * self._load_s) if self._load_s else float("inf")
        with self._lock:
            while self._answer is None and not child.is_gone and not self._closing:
                if time.monotonic() - child.began > limit:
                    break
                self._lock.wait(TICK_S)
        if isinstance(self._answer, Ready):  # looked at again: it may have been the last that the process said
            self._load_s = self._load_s or time.monotonic() - child.began
            self._take_over(child, self._answer)
            return child
        how = child.end()
        if isinstance(self._answer, Refused):
            error, kernels = self._answer.error, self._answer.kernels
        else:
            error = DeviceError(f"the engine's process ended while it was loading: {how}")
            kernels = child.beat[0].kernels if child.beat is not None else ()
        if isinstance(error, DeviceError):
            self._device_failures.append(time.monotonic())
        self._demote(kernels)
        return error

    def _demote(self, kernels: Sequence[str]) -> bool:
        """Do without implementations that failed while they ran; False if that changes nothing."""
        new = set(kernels) - self._demoted
        if new:
            log.error("not used any more before the next start: %s", ", ".join(sorted(new)))
            self._demoted |= new
            self._device_failures.clear()
        return bool(new)

    def _wants_examination(self) -> bool:
        """The device failed twice in a short time and nobody knows at what."""
        now = time.monotonic()
        self._device_failures = [at for at in self._device_failures if now - at < EXAMINE_S]
        if len(self._device_failures) < 2:
            return False
        self._device_failures.clear()
        return True

    def _take_over(self, child: EngineProcess, ready: Ready) -> None:
        """Give a new engine what is to be done: suspects one at a time, so that a crash has one to blame."""
        self._drop_cancelled()
        with self._lock:
            self._info, self._error = self._info or ready.info, None
            records = list(self._records.values())
            suspects = [r for r in records if len(r.crashes) >= N_CRASH - 1]
            self._trial, self._held = (suspects[0] if suspects else None), suspects[1:]
            for record in records:
                if record not in self._held:
                    child.send(record.submit())
            replayed = [r for r in records if r.has_begun]
            self.n_replayed += sum(len(r.request.prompt) + len(r.tokens) for r in replayed)
            self._child = child
            was, self._state = self._state, "ok"
            self._lock.notify_all()
        if was != "loading":
            log.warning(
                "the engine is back after %.1f s; %d requests go on", time.monotonic() - self._lost_at, len(replayed)
            )

    def _next_trial(self) -> None:
        """The suspect got past where engines crashed: the next one's turn."""
        with self._lock:
            self._trial = self._held.pop(0) if self._held else None
            if self._trial is not None and self._child is not None:
                self._child.send(self._trial.submit())

    def _watch(self, child: EngineProcess) -> End | None:
        """Until the engine ends or hangs; None: it is to be closed."""
        began = looked = time.monotonic()
        with self._lock:
            while not self._closing:
                now = time.monotonic()
                if now - looked > 20 * TICK_S:  # it was us who did not run: a machine that slept, say
                    child.forgive(now)
                looked = now
                if self._fatal is not None:
                    return End(str(self._fatal.error), kernels=self._fatal.kernels, of_device=True)
                if child.is_gone:
                    return End("")
                if self._is_examined and now - began > EXAMINED_S:
                    return End("nothing failed while it was examined, and it is slow", from_outside=True)
                if (end := self._hangs(child, now)) is not None:
                    return end
                self._lock.wait(TICK_S)
        return None

    def _hangs(self, child: EngineProcess, now: float) -> End | None:
        silent = now - child.heard
        if silent > STOPPED_S and child.is_stopped:
            return End(f"its process has been stopped for {silent:.1f} s", from_outside=True)
        beat, at = child.beat or (Heartbeat(), child.heard)
        if not beat.step_age:
            return End(f"it has said nothing for {silent:.0f} s", hung=True) if silent > SILENT_S else None
        age, limit = beat.step_age + now - at, self._limit(beat)
        if age <= limit:
            return None
        why = f"a round has been under way for {age:.1f} s, more than {limit:.1f}"
        return End(why, kernels=beat.kernels, of_device=True, hung=True)

    def _limit(self, beat: Heartbeat) -> float:
        """Seconds a round may take. Who was wrong about it is more patient."""
        if self.settings.hang_timeout:
            return self.settings.hang_timeout
        least, unknown = HANG_S["cpu" if self.info.device.startswith("cpu") else "gpu"]
        limit = max(least, HANG_FACTOR * beat.expected) if beat.expected else unknown
        recent = sum(time.monotonic() - at < EXAMINE_S for at in self._hang_times)
        return limit * 2**recent

    def _bury(self, child: EngineProcess, end: End | None) -> None:
        """The engine is gone: whose fault was it, and what is left to do."""
        self._lost_at = time.monotonic()
        with self._lock:
            self._child = None
            self._state = "recovering"
            self._lock.notify_all()
        how = child.end()
        self._past, self._now = _sum(self._past, self._now), Metrics()
        if end is None:
            return
        if not end.why and self._fatal is not None:  # it was read last
            end = End(str(self._fatal.error), kernels=self._fatal.kernels, of_device=True)
        if not end.why:
            end = replace(end, why=f"its process ended: {how}", from_outside=child.was_killed)
        self.n_restart += 1
        log.error("the engine is replaced: %s", end.why)
        self._judge(end)

    def _judge(self, end: End) -> None:
        """Kernels that failed are not used again; requests that ran are suspects; nobody hears twice what was said."""
        if end.of_device:
            self._device_failures.append(self._lost_at)
        if end.hung:
            self._hang_times.append(self._lost_at)
        is_mended = self._demote(end.kernels)
        guilty, records = [], list(self._records.values())
        for record in records:
            if record.in_slot and not is_mended:
                record.blame(from_outside=end.from_outside)
                if len(record.crashes) >= N_CRASH:
                    guilty.append(record)
            record.lose_engine(self.tokenizer)
        why = f"the engine ended {N_CRASH} times while this request ran, the last time because of this: {end.why}"
        self._fail(guilty, SlotError(why))
        self._drop_cancelled()

    def _stop(self) -> None:
        """Nobody is served any more."""
        with self._lock:
            self._state = "stopped"
            self._error = self._error or Unavailable("the engine was closed")
            self._child, lost = None, list(self._records.values())
            self._lock.notify_all()
        self._fail(lost, self._error)


def _relay(line: LogLine) -> None:
    logger = logging.getLogger(line.name)
    if logger.isEnabledFor(line.level):
        record = logger.makeRecord(line.name, line.level, "", 0, "%s", (line.text,), None)
        record.created = line.created
        logger.handle(record)


def _sum(past: Metrics, now: Metrics) -> Metrics:
    """What two engines counted together, and the second one's gauges."""
    values: dict[str, object] = {}
    for f in fields(Metrics):
        a, b = getattr(past, f.name), getattr(now, f.name)
        if f.name == "n_tokens_max":
            values[f.name] = max(a, b)
        elif f.name in GAUGES:
            values[f.name] = b
        elif isinstance(b, tuple):
            n = max(len(a), len(b))
            values[f.name] = tuple(x + y for x, y in zip(a + (0,) * (n - len(a)), b + (0,) * (n - len(b)), strict=True))
        else:
            values[f.name] = a + b
    return Metrics(**values)  # type: ignore[arg-type]
