"""The supervisor keeps an engine process running: one that dies or hangs is replaced, and its requests continue.

It keeps the delivered tokens of every request (supervised_request.py). A new engine gets the same requests with their tokens so far,
so clients see a pause. Nothing here imports torch: a program that uses an isolated engine stays small.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pyspec import progress
from pyspec.config import EngineSettings
from pyspec.engine.loop.slot_task import careful
from pyspec.engine.messages import (
    Blocks,
    Cancel,
    Events,
    Heartbeat,
    LoadStage,
    LogLine,
    Looked,
    Ready,
    unpack,
)
from pyspec.engine.policy.affinity import chain_of
from pyspec.engine.policy.evict import LeftTexts, evict_for
from pyspec.engine.process.ahead import COMMAND
from pyspec.engine.process.metrics_sum import metrics_sum
from pyspec.engine.process.process import TICK_S, EngineEnd, EngineProcess, Launcher, Watchdog
from pyspec.engine.process.supervised_request import N_CRASH, CrashBlame, Sink, SupervisedRequest
from pyspec.errors import (
    DeviceError,
    HostLost,
    NoDevice,
    PyspecError,
    QueueFull,
    RankLost,
    SlotError,
    Unavailable,
)
from pyspec.gguf import open_gguf
from pyspec.repeats import limited
from pyspec.request import (
    Done,
    EngineInfo,
    Event,
    Failed,
    Metrics,
    ReplicaInfo,
    Request,
    SlotInfo,
    Started,
)
from pyspec.sample.noise import resolve_seed
from pyspec.slot_action import SlotAction, SlotAnswer
from pyspec.slots.blocks import CLEARED, BlockChange
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer

# -- the place among replicas ----------------------------------------------------------------------------------------
# The place of a supervisor among several of one model (replicas.py), which makes its names, slots and lines of the log unique.


@dataclass(frozen=True)
class ReplicaPlace:
    """Where a supervisor stands; alone, it has all defaults.

    ids           numbers of requests, which all of them share
    first_slot    number of its first slot
    label         begins lines of its log
    reports       it reports the progress of its load
    shares_queue  places to wait are counted for all together (replicas.py), not here
    texts         gives the file's tokenizer and template, which all of them share; None: it reads them itself
    on_loss       called without a lock when its engine has ended, or can not be loaded: its requests may go to others
    on_stop       called without a lock when it has failed to load for long, and requests that stay would fail: others that may still come
                  take them. Returns the subject of the sentence for those that stay
    """

    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    first_slot: int = 0
    label: str = ""
    reports: bool = True
    shares_queue: bool = False
    texts: Callable[[], tuple[Tokenizer, ChatTemplate | None]] | None = None
    on_loss: Callable[[], None] = lambda: None
    on_stop: Callable[[], str] = lambda: "the engine"

    def report(self, stage: LoadStage) -> None:
        """Report the progress of its load, if it is this one's to report."""
        if self.reports:
            progress.report(stage.stage, stage.fraction)

    def rows(self, rows: Iterable[SlotInfo]) -> list[SlotInfo]:
        """Its slots by their numbers among all."""
        return [replace(row, slot=self.first_slot + row.slot) for row in rows]

    def placed(self, event: Event) -> Event:
        """An event with its slot's number among all."""
        if isinstance(event, Started | Done) and event.slot >= 0 and self.first_slot:
            return replace(event, slot=self.first_slot + event.slot)
        return event

    def relay(self, line: LogLine) -> None:
        """Log a line of the engine here."""
        logger = logging.getLogger(line.name)
        if logger.isEnabledFor(line.level):
            text = self.label + line.text
            record = logger.makeRecord(line.name, line.level, "", 0, "%s", (text,), None)
            record.fields = line.fields or {}
            record.created = line.created
            logger.handle(record)


log = limited(__name__)

BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)  # before each load after one that failed
N_LOAD = 3  # failed first loads after which the supervisor gives up
N_LOAD_AGAIN = 5  # failed later loads after which requests fail; a dead engine may free its memory late
EXAMINED_S = 120.0  # seconds of an examined engine, which is slow
CLOSE_S = 5.0
LOOK_S = 1.0  # seconds in which an engine tells its state
REST_S = 120.0  # seconds in which an engine parks or wakes


class Supervisor:
    """A Core with its engine in another process. Safe to call from any thread.

    An engine that ends while it is parked, or on its way, is not replaced: another one would take memory that nobody gave it.

    on_blocks  called with the changes of the engine's prefix cache; must not block
    """

    def __init__(
        self,
        path: Path,
        settings: EngineSettings,
        *,
        command: Sequence[str] = (),
        on_blocks: Callable[[Sequence[BlockChange]], None] | None = None,
        place: ReplicaPlace | None = None,
    ) -> None:
        self.path, self.settings = path, settings
        self._on_blocks = on_blocks or (lambda changes: None)
        self._place = place or ReplicaPlace()
        self._launcher = Launcher(path, settings, command or COMMAND, self._on_message, self._gone)
        self.n_restart = self.n_replayed = 0
        self._info: EngineInfo | None = None
        self._state = "loading"  # then "ok", "recovering", "stopped"
        self._error: PyspecError | None = None  # why it is stopped
        self._records: dict[str, SupervisedRequest] = {}
        self._ids = self._place.ids
        self._lock = threading.Condition()
        self._child: EngineProcess | None = None  # takes requests
        self.left = LeftTexts(0)  # in the engine's cache, probably
        self._suspects, self._watchdog = CrashBlame(), Watchdog(settings.hang_timeout)
        self._lost_at = 0.0  # when the last engine ended
        self._past = Metrics()  # counters of earlier engines
        self._now = Metrics()  # counters in the current engine's last message
        self._own_failed = self._own_cancelled = 0
        self._is_parked = False  # or on its way there, or back
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
    def texts(self) -> tuple[Tokenizer, ChatTemplate | None]:
        """From one read of the file."""
        if self._place.texts is not None:
            return self._place.texts()
        with open_gguf(self.path) as file:
            return Tokenizer.from_metadata(file.metadata), ChatTemplate.from_metadata(file.metadata)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.texts[0]

    @property
    def template(self) -> ChatTemplate | None:
        return self.texts[1]

    def wait(self) -> None:
        """Wait until the engine is loaded. Raises the reason if it can not be."""
        with self._lock:
            while self._info is None and self._error is None:
                self._lock.wait()
            if self._info is None and self._error is not None:
                raise self._error

    def submit(self, request: Request, sink: Sink, keys: Sequence[int] | None = None) -> str:
        """See Engine.submit. Requests that come while the engine is replaced wait.

        keys  `chain` of the prompt, if it is known
        """
        if os.getpid() != self._pid:
            raise Unavailable(
                f"this engine belongs to process {self._pid}; load one in process {os.getpid()}"
            )
        seed = resolve_seed(request.params.seed)
        if keys is None:
            keys = chain_of(request)
        with self._lock:
            if self._state == "stopped" or self._closing:
                raise Unavailable(f"the engine has stopped: {self._error or 'the engine was closed'}")
            if self._is_parked:
                raise Unavailable("the engine is parked")
            record = SupervisedRequest(f"r{next(self._ids)}", request, seed, sink)
            record.key = keys[-1] if keys else None
            waiting = [] if self._place.shares_queue else self.waiting()
            other = evict_for(
                record, waiting, self.settings.queue_limit, lambda: self.left.goes_on(keys)
            )
            self._records[record.name] = record
            if self._child is not None:
                self._child.send(record.submit())
        if other is not None:
            self.oust(other, len(waiting))
        return record.name

    def waiting(self) -> list[SupervisedRequest]:
        """Requests that were never seated, in order of arrival."""
        with self._lock:
            # a list first, because the reader's thread removes those that end without the lock
            return [r for r in list(self._records.values()) if not r.has_begun and not r.cancelled]

    def oust(self, record: SupervisedRequest, n_waiting: int) -> None:
        """Take a request's place in the queue away; it fails with QueueFull. Does nothing if it is not here."""
        if record.name in self._records:
            record.ousted = QueueFull(n_waiting)
            self.cancel(record.name)

    def cancel(self, name: str) -> None:
        """See Engine.cancel. Without an engine, the request ends here."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            record = self._records.get(name)
            if record is None:
                return
            record.cancelled = True
            if self._child is not None and record not in self._suspects.held:
                self._child.send(Cancel(name))
                return
        self._drop_cancelled()

    # -- requests that change their supervisor ----------------------------------------------------------------------

    @property
    def n_open(self) -> int:
        """Requests that have not ended."""
        return len(self._records)

    def movable(self, *, suspects: bool = False) -> list[SupervisedRequest]:
        """Requests that another supervisor may have, not those of a certain slot: those suspected of crashes, or all others."""
        with self._lock:
            records = list(self._records.values())
        return [r for r in records if r.wanted_slot < 0 and suspects is (len(r.crashes) >= N_CRASH - 1)]

    def release(self, record: SupervisedRequest) -> bool:
        """Give a request away. Returns False if it has ended."""
        with self._lock:
            return self._child is None and self._records.pop(record.name, None) is not None

    def adopt(self, record: SupervisedRequest) -> None:
        """Continue a request of another supervisor, beyond the limit of the queue if need be."""
        with self._lock:
            self._records[record.name] = record
            if record.has_begun:
                self.n_replayed += len(record.request.prompt) + len(record.tokens)
            if self._child is not None:
                self._child.send(record.submit())
                if record.cancelled:
                    self._child.send(Cancel(record.name))
            has_stopped, why = self._state == "stopped", self._error
        if has_stopped:  # just now
            self._fail([record], Unavailable(f"the engine has stopped: {why}"))

    def act_on_slot(self, action: SlotAction, on_answer: Callable[[SlotAnswer], None]) -> None:
        """See Engine.act_on_slot. Slot contents and pending actions are lost with their engine."""
        tell = careful(on_answer)
        with self._lock:
            if self._child is not None and os.getpid() == self._pid:
                lost = Unavailable("the engine was replaced, and its slots' content is lost")
                self._child.ask("act", lambda answer: tell(answer or lost), action)
                return
        on_answer(Unavailable("the engine is not there, or is being replaced: try again"))

    def park(self) -> None:
        end = time.monotonic() + CLOSE_S
        with self._lock:
            while self._records and time.monotonic() < end:  # cancelled ones end with their round
                self._lock.wait(TICK_S)
            if self._is_parked or self._records or self._child is None:
                raise Unavailable("an engine that serves is not parked")
            self._is_parked = True
            try:
                self._rest("park")
            except BaseException:
                self._is_parked = self._child is None  # else it serves as before
                raise
            self._forget_texts()

    def wake(self) -> None:
        with self._lock:
            if not self._is_parked:
                return
            self._rest("wake")
            self._is_parked = False

    def _rest(self, what: Literal["park", "wake"]) -> None:
        """Have the engine park or wake, and wait for it. Called with the lock."""
        answer = self._answer(what, REST_S)
        if answer is None:
            raise DeviceError("the engine ended, or did not answer, while it was parked or woken")
        if isinstance(answer, PyspecError):
            raise answer

    def _answer(self, what: Literal["look", "park", "wake"], limit_s: float) -> Any:
        """The engine's answer to a question; None if it gives none in time, or ends. Called with the lock."""
        child, found = self._child, list[Any]()

        def hear(answer: Any) -> None:
            with self._lock:
                if isinstance(answer, Looked):
                    self._now = answer.metrics
                found.append(answer)
                self._lock.notify_all()

        if child is not None:
            child.ask(what, hear)
            self._lock.wait_for(lambda: found or self._child is not child, limit_s)
        return found[0] if found else None

    def in_listener(self) -> bool:
        child = self._child
        return threading.current_thread() is self._thread or (child is not None and child.is_reader)

    def alive(self) -> bool:
        return self._state in ("ok", "recovering")

    def state(self) -> str:
        return self._state

    def slots(self) -> list[SlotInfo]:
        if (looked := self._look()) is not None:
            return self._place.rows(looked.slots)
        n, n_ctx = self.info.n_slot, self.info.n_ctx
        return self._place.rows(SlotInfo(slot=i, n_ctx=n_ctx, is_processing=False) for i in range(n))

    def replicas(self, *, counts: bool = True) -> list[ReplicaInfo]:
        return []

    def metrics(self) -> Metrics:
        looked = self._look()
        now = self._now if looked is None else looked.metrics
        with self._lock:
            waiting = sum(not record.in_slot for record in list(self._records.values()))
            own = {"requests_failed": self._own_failed, "requests_cancelled": self._own_cancelled}
        total = metrics_sum(self._past, now)
        beat = self._child.beat if self._child is not None else None
        silent = time.monotonic() - beat[1] if beat is not None and looked is None else 0.0
        return replace(
            total,
            requests_queued=waiting,
            restarts=self.n_restart,
            tokens_replayed=self.n_replayed,
            seconds_since_step=max(
                now.seconds_since_step, silent if waiting or now.requests_processing else 0.0
            ),
            **{name: getattr(total, name) + n for name, n in own.items()},
        )

    def close(self, limit_s: float = CLOSE_S) -> bool:
        """End the process at once; running requests fail with Unavailable."""
        if os.getpid() != self._pid:
            return True
        self.begin_close()
        if threading.current_thread() is not self._thread:
            self._thread.join(limit_s + CLOSE_S)
        return not self._thread.is_alive()

    def begin_close(self) -> None:
        """Let the process end, and wait for nothing."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()

    def _look(self) -> Looked | None:
        """The engine's state. None if it does not answer, or if called by a listener, which would block the answer."""
        with self._lock:
            child = self._child
            if child is None or child.is_reader or time.monotonic() - child.received > LOOK_S:
                return None
            looked = self._answer("look", LOOK_S)
            return looked if isinstance(looked, Looked) else None

    # -- messages, on the reader thread -----------------------------------------------------------------------------

    def _on_message(self, message: object) -> None:
        if isinstance(message, Events):
            for packed in message.packed:
                self._deliver(unpack(packed))
        elif isinstance(message, Blocks):
            self._on_blocks(message.changes)
        elif isinstance(message, Heartbeat):
            self._now = message.metrics or self._now
        elif isinstance(message, LogLine):
            self._place.relay(message)
        elif isinstance(message, LoadStage):
            self._place.report(message)
        else:
            self._gone()

    def _gone(self) -> None:
        """Wake threads that wait for a process."""
        with self._lock:
            self._lock.notify_all()

    def _deliver(self, event: Event) -> None:
        record = self._records.get(event.request)
        if record is None:
            return
        if (delivered := record.on_event(event)) is not None:
            self._pass_on(record, delivered)
        if record is self._suspects.trial and (
            isinstance(event, Done | Failed) or record.is_past_its_crash
        ):
            with self._lock:
                then = self._suspects.acquit()
                if then is not None and self._child is not None:
                    self._child.send(then.submit())

    def _pass_on(self, record: SupervisedRequest, event: Event) -> None:
        """Call the listener. It is the caller's code: any exception ends only its request."""
        if isinstance(event, Done | Failed):
            self._records.pop(record.name, None)
        if isinstance(event, Done) and record.has_begun and record.key is not None:
            with self._lock:
                self.left.leave(record.key, len(record.request.prompt) + len(record.tokens))
        if record.ousted is not None and isinstance(event, Done) and event.finish == "cancelled":
            event = Failed(record.name, record.ousted)
        try:
            record.sink(self._place.placed(event))
        except BaseException:
            if not record.is_logged:
                log.exception("the listener of request %s failed", record.name)
            record.is_logged = True
            self.cancel(record.name)

    def _drop_cancelled(self) -> None:
        """End cancelled requests that no engine has."""
        with self._lock:
            held, records = self._suspects.held, list(self._records.values())
            gone = [r for r in records if r.cancelled and (self._child is None or r in held)]
            self._suspects.held = [r for r in held if r not in gone]
            self._own_cancelled += len(gone)
        for record in gone:
            self._pass_on(record, record.cancelled_event())

    def _fail(self, records: Sequence[SupervisedRequest], error: PyspecError) -> None:
        for record in records:
            if self._records.pop(record.name, None) is not None:  # else it has ended
                self._own_failed += 1
                self._pass_on(record, Failed(record.name, error))

    # -- the life of engines, on the supervisor's thread -----------------------------------------------------------

    def _live(self) -> None:
        try:
            self._replace_engines()
        except BaseException as e:  # no caller above would see it
            log.exception("%sthe supervisor stops", self._place.label)
            self._error = PyspecError(f"the supervisor failed: {type(e).__name__}: {e}")
        self._stop()

    def _replace_engines(self) -> None:
        """Run one engine after another, until closed or until the first one can not be loaded."""
        n_failed = 0
        while not self._closing:
            with self._lock:
                self._lock.wait_for(lambda: self._closing, BACKOFF_S[min(n_failed, len(BACKOFF_S) - 1)])
            n_demoted = len(self._launcher.demoted)
            child = self._launcher.launch(self._lock, lambda: self._closing)
            if isinstance(child, EngineProcess):
                n_failed = 0
                self._take_over(child)
                self._bury(child, self._watch(child))
                if self._is_parked:
                    self._error = Unavailable("the engine ended while it was parked")
                    return
            elif not self._closing:
                n_failed = n_failed + 1 if n_demoted == len(self._launcher.demoted) else 0
                if not self._survives(child, n_failed):
                    return

    def _survives(self, error: PyspecError, n_failed: int) -> bool:
        """A load failed. Returns True to try again; the first load's lasting errors are for the caller."""
        is_lasting = not isinstance(error, DeviceError) or isinstance(error, NoDevice)
        if self._info is None and (is_lasting or n_failed >= N_LOAD):
            self._error = error
            return False
        log.error("%sthe engine could not be loaded (%s); trying again", self._place.label, error)
        self._place.on_loss()
        if n_failed >= N_LOAD_AGAIN and self._info is not None:
            with self._lock:
                self._state, self._error = "stopped", error
            why = Unavailable(f"{self._place.on_stop()} failed and could not be loaded again: {error}")
            self._fail(list(self._records.values()), why)
        return True

    def _take_over(self, child: EngineProcess) -> None:
        """Give the requests to a new engine, suspects one at a time."""
        self._drop_cancelled()
        with self._lock:
            assert isinstance(child.answer, Ready)
            self._info, self._error = self._info or child.answer.info, None
            self._forget_texts()
            records = list(self._records.values())
            for record in self._suspects.begin(records):
                child.send(record.submit())
            replayed = [r for r in records if r.has_begun]
            self.n_replayed += sum(len(r.request.prompt) + len(r.tokens) for r in replayed)
            self._child = child
            was, self._state = self._state, "ok"
            self._lock.notify_all()
        if was != "loading":
            away_s = time.monotonic() - self._lost_at
            fields = {"event": "engine_back", "seconds": round(away_s, 1), "requests": len(replayed)}
            text = "%sthe engine is back after %.1f s; %d requests continue"
            log.warning(text, self._place.label, away_s, len(replayed), extra={"fields": fields})

    def _forget_texts(self) -> None:
        self.left = LeftTexts(self.info.n_row or self.info.n_slot * self.info.n_ctx)

    def _watch(self, child: EngineProcess) -> EngineEnd | None:
        """Wait until the engine ends or hangs. Returns None if it is to be closed."""
        began = time.monotonic()
        while not self._closing:
            if child.fatal is not None or child.is_gone:
                return EngineEnd("")
            age = time.monotonic() - began
            if self._launcher.is_examined and age > EXAMINED_S:
                return EngineEnd(
                    "nothing failed while it was examined, and it is slow", from_outside=True
                )
            if (end := self._watchdog.look(child, self.info.device)) is not None:
                return end
            with self._lock:
                if (
                    child.fatal is None and not self._closing and not child.is_gone
                ):  # it may have ended before
                    self._lock.wait(TICK_S)
        return None

    def _bury(self, child: EngineProcess, end: EngineEnd | None) -> None:
        """Clean up after an engine that ended, and decide whose fault it was."""
        self._lost_at = time.monotonic()
        with self._lock:
            self._child = None
            self._state = "recovering"
            self._lock.notify_all()
        how = child.end()
        self._on_blocks(CLEARED)
        self._past, self._now = metrics_sum(self._past, self._now), Metrics()
        if end is None:
            return
        if not end.why and child.fatal is not None:
            error = child.fatal.error
            is_late = isinstance(error, HostLost)
            of_device = not is_late and not isinstance(error, RankLost)  # these name no kernel
            end = EngineEnd(str(error), is_late, child.fatal.kernels, of_device)
        if not end.why:
            end = replace(end, why=f"its process ended: {how}", from_outside=child.was_killed)
        self.n_restart += 1
        log.error(
            "%sthe engine %s: %s",
            self._place.label,
            "has ended while it was parked" if self._is_parked else "is replaced",
            end.why,
            extra={"fields": {"event": "engine_replaced", "why": end.why}},
        )
        self._judge(end)

    def _judge(self, end: EngineEnd) -> None:
        """Demote kernels that failed, and make running requests suspects."""
        is_mended = self._launcher.learn(end.kernels, of_device=end.of_device)
        records = list(self._records.values())
        running = [r for r in records if r.in_slot and not is_mended]
        guilty = self._suspects.accuse(running, from_outside=end.from_outside)
        unread: list[SupervisedRequest] = []  # the file may be gone, and with it the lengths of texts
        for record in records:
            try:
                record.lose_engine(self.tokenizer)
            except PyspecError as e:
                log.error("%srequest %s can not continue: %s", self._place.label, record.name, e)
                unread.append(record)
        self._fail(
            unread, Unavailable("the engine ended, and the model's file can not be read any more")
        )
        why = f"the engine ended {N_CRASH} times while this request ran, the last time because of this: {end.why}"
        self._fail(guilty, SlotError(why))
        self._drop_cancelled()
        self._place.on_loss()

    def _stop(self) -> None:
        """Fail every request: no engine runs any more."""
        with self._lock:
            self._state = "stopped"
            self._error = self._error or Unavailable("the engine was closed")
            self._child, lost = None, list(self._records.values())
            self._lock.notify_all()
        self._fail(lost, self._error)
