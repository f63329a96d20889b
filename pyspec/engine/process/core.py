"""The engine's thread: submit, cancel and events around the loop, in the program's process or in one of its own.

Requests arrive validated (validate.py). Each round's events are delivered as one batch: to the listeners of this process, or as one
message to the program's process (engine_main.py).
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

from pyspec.config import EngineSettings
from pyspec.cpu.kernels import here
from pyspec.cuda import kernel_context
from pyspec.device.worker import failure_of
from pyspec.engine.load.load import Loaded, load
from pyspec.engine.loop.block_feed import BlockFeed, Send
from pyspec.engine.loop.grammars import Grammars
from pyspec.engine.loop.job import Job, Sink, blamed
from pyspec.engine.loop.parking import FLUSH_S, park, wake
from pyspec.engine.loop.slot_actions import SlotActions
from pyspec.engine.loop.slot_task import SlotTask
from pyspec.engine.policy.evict import evict_for
from pyspec.engine.process.process import RoundPace
from pyspec.errors import DeviceError, PyspecError, QueueFull, Unavailable
from pyspec.gguf import GGUFFile
from pyspec.heap import give_back_memory
from pyspec.repeats import limited
from pyspec.request import Delta, Done, Event, Failed, Metrics, ReplicaInfo, Request, SlotInfo, Started
from pyspec.sample.budget import BudgetRule
from pyspec.sample.dry import DryBreakers
from pyspec.sample.sampler import SlotSampler
from pyspec.slot_action import SlotAction, SlotAnswer
from pyspec.text.stream import TextStream

log = limited(__name__)

Due = Sequence[tuple[Sink, Event]]
"""Events in order, each with the listener of its request."""

REST_S = 1.0  # idle seconds after which freed memory goes back to the system
TRIM_S = 60.0  # seconds of rounds without rest after which it goes back meanwhile: the C library keeps ten MiB of each minute
CLOSE_S = 30.0  # a round may take seconds; a hanging device never returns
_ENDING = threading.Event()  # the main thread has ended; other threads may still run
_LOADED_IN: list[int] = []  # the process that loaded the first engine
_RUNNING: weakref.WeakSet[EngineCore] = weakref.WeakSet()


class EngineCore:
    """One loaded loop and the thread that runs it. Safe to call from any thread of its process.

    hand_over  takes each round's events in place of the listeners; called on the engine's thread
    on_death   called first with the reason if the engine stops by itself
    on_blocks  called with the changes of the prefix cache, on the engine's thread
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        hand_over: Callable[[Due], None] | None = None,
        on_death: Callable[[PyspecError], None] | None = None,
        on_blocks: Send | None = None,
    ) -> None:
        self.loop = loaded.loop
        self._feed = None if on_blocks is None else BlockFeed(loaded.loop.cache, on_blocks)
        self.tokenizer = loaded.tokenizer
        self.template = loaded.template
        self.info = replace(loaded.info, n_row=loaded.loop.n_row)
        self.step_began = 0.0  # start of the current round; 0: none runs
        self.pace = RoundPace()
        self._deliver, self._on_death = hand_over or self._call_listeners, on_death
        self._is_remote = hand_over is not None
        self.loop.raises_bugs = (
            self._is_remote
        )  # the supervisor starts another process, and no request ends
        self._breakers = DryBreakers(self.tokenizer)
        self.grammars = Grammars(self.tokenizer, self.info.n_vocab, drafts=self.loop.n_draft_max > 0)
        self._ids = itertools.count(1)
        self._wake = threading.Condition()
        self._inbox: list[Job] = []
        self._slot_tasks: list[SlotTask] = []
        self._actions = SlotActions(self.loop.imager(), self.info)
        self._jobs: dict[str, Job] = {}  # in order of arrival
        self._failed_listeners: set[str] = set()  # by request: their further failures are not logged
        # requests that lost their place to another client's, until their last event
        self._ousted: dict[str, QueueFull] = {}
        self._due: list[tuple[Sink, Event]] = []
        self._is_urgent = False
        self.on_rest: Callable[[], object] = lambda: None  # on the engine's thread, once for each rest
        self._is_rested = (
            False  # no round, and no load, has run since freed memory went back to the system
        )
        self._trimmed = time.monotonic()
        if self.loop.may_defer:
            self.loop.on_wait = self._hand_out
        self._disk, self._learned = loaded.disk, loaded.learned
        if self._disk is not None:
            self._disk.on_work = self._nudge
        self._is_parked = False  # or about to be
        self._move: tuple[Callable[[], None], Future[None]] | None = (
            None  # a park or a wake, and its end
        )
        self._error: PyspecError | None = None
        self._lost: PyspecError | None = None  # a rank is gone, so the engine ends
        self._ranks = loaded.ranks
        if loaded.ranks is not None:
            loaded.ranks.when_lost(self._lose_rank)
        self._closing = False
        self._pid = os.getpid()
        self._kernels, has_begun = loaded.kernels, threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(has_begun,), name="pyspec-engine", daemon=True
        )
        with kernel_context.within(
            self._kernels
        ):  # torch's thread count applies to threads that start meanwhile, as this one must
            self._thread.start()
            has_begun.wait()
        _RUNNING.add(self)

    @classmethod
    def load(
        cls,
        path: Path,
        settings: EngineSettings,
        *,
        hand_over: Callable[[Due], None] | None = None,
        on_death: Callable[[PyspecError], None] | None = None,
        on_blocks: Send | None = None,
        file: GGUFFile | None = None,
    ) -> EngineCore:
        """Load a model from a file into a core. Kernels that failed in an earlier engine are left out.

        file  the same file, if it is open already
        """
        _refuse_fork()
        core = cls(
            load(path, settings, is_isolated=hand_over is not None, file=file),
            hand_over=hand_over,
            on_death=on_death,
            on_blocks=on_blocks,
        )
        if settings.warm_up:
            core.warm_grammars()
        return core

    def warm_grammars(self) -> None:
        """Prepare for grammars. On a CPU the first request with one does it, in half a second: 250,000 tokens take 80 MiB."""
        if self.info.device != "cpu":
            self.grammars.warm()

    # -- from any thread -----------------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink, *, name: str = "", seed: int | None = None) -> str:
        """Queue a validated request, under a new name if it has none. `sink` must not block.

        seed  replaces the request's seed, which may ask for a random one

        Raises QueueFull if too many wait, Unavailable if the engine is down.
        """
        if os.getpid() != self._pid:
            raise Unavailable(
                f"this engine runs in process {self._pid} and does not survive a fork; "
                f"load one in process {os.getpid()}, or start that with spawn"
            )
        job = self._job(request, sink, name or f"r{next(self._ids)}", seed)
        with self._wake:
            if self._error is not None or self._closing:
                raise Unavailable(f"the engine has stopped: {self._error or 'the engine was closed'}")
            if self._is_parked:
                raise Unavailable("the engine is parked")
            if not self._is_remote:  # else the supervisor counts waiting requests
                self._make_room(job)
            self._jobs[job.id] = job
            if request.grammar is not None:
                self.grammars.begin(job, request.grammar, self._constrained)
                return job.id
            self._inbox.append(job)
            self._wake.notify()
        return job.id

    def _make_room(self, job: Job) -> None:
        """Make a place to wait for a job, perhaps by evicting another. Raises QueueFull."""
        waiting = [other for other in list(self._jobs.values()) if other.waits]
        other = evict_for(job, waiting, self.loop.queue_limit)
        if other is not None:
            self._ousted[other.id] = QueueFull(len(waiting))
            self.loop.cancel(other)

    def _constrained(self, job: Job) -> None:
        """Take in a job whose grammar is compiled, or failed to compile."""
        with self._wake:
            is_late = self._error is not None
            if not is_late:
                self._inbox.append(job)
                self._wake.notify()
        if is_late:
            job.sink(Failed(job.id, Unavailable(f"the engine has stopped: {self._error}")))
            self._hand_out()

    def cancel(self, name: str) -> None:
        """End a request at the next round; unknown and finished ones are ignored."""
        if os.getpid() != self._pid:
            return
        with self._wake:
            job = self._jobs.get(name)
            if job is not None:
                self.loop.cancel(job)
                self._wake.notify()

    def act_on_slot(self, action: SlotAction, on_answer: Callable[[SlotAnswer], None]) -> None:
        """Save, restore or erase a slot's content once it is idle. `on_answer` is called once, on any thread."""
        if os.getpid() != self._pid:
            on_answer(
                Unavailable(f"this engine runs in process {self._pid} and does not survive a fork")
            )
            return
        self._actions.begin(action, on_answer, self._add_slot_task)

    def park(self) -> None:
        """See Core.park."""
        with self._wake:
            if self._is_parked or self._jobs:
                raise Unavailable("an engine that serves is not parked")
            self._is_parked = True
        try:
            self._moved(partial(park, self.loop))
        except BaseException:
            self._is_parked = False  # all is as before
            raise

    def wake(self) -> None:
        """See Core.wake."""
        if self._is_parked:
            self._moved(partial(wake, self.loop))
            self._is_parked = False

    def _moved(self, work: Callable[[], None]) -> None:
        """Have the engine's thread do this once nothing runs, and wait for it. Raises its error."""
        end: Future[None] = Future()
        with self._wake:
            if self._error is not None or self._closing or self._move is not None:
                raise Unavailable("the engine has stopped, or is on its way already")
            self._move = work, end
            self._wake.notify()
        end.result()

    def _add_slot_task(self, task: SlotTask) -> None:
        with self._wake:
            error = self._error or (Unavailable("the engine was closed") if self._closing else None)
            if error is None:
                self._slot_tasks.append(task)
                self._wake.notify()
        if error is not None:
            task.failed(Unavailable(f"the engine has stopped: {error}"))

    def _job(self, request: Request, sink: Sink, name: str, seed: int | None) -> Job:
        info = self.info
        limit = min(info.n_ctx, info.n_row - info.n_overhang)
        most = limit if request.max_tokens < 0 else min(limit, len(request.prompt) + request.max_tokens)
        params = request.params if seed is None else replace(request.params, seed=seed)
        if banned := self.tokenizer.suppressed:
            bans = ((token, -inf) for token in sorted(banned))
            params = replace(params, logit_bias=(*params.logit_bias, *bans))
        think = request.think_budget
        budget = None if think is None else BudgetRule(think, self.tokenizer.token_bytes)
        sampler = SlotSampler(
            params, info.n_vocab, self.tokenizer.eog, request.prompt, self._breakers, budget
        )
        sampler.races = info.draft_sampling != "argmax"

        is_first = [True]  # the client has waited longest for the first token

        def deliver(event: Event) -> None:
            if isinstance(event, Done | Failed):
                self._jobs.pop(event.request, None)
                error = self._ousted.pop(event.request, None)
                if error is not None and isinstance(event, Done) and event.finish == "cancelled":
                    event = Failed(event.request, error)
            self._is_urgent = self._is_urgent or not isinstance(event, Delta) or is_first[0]
            is_first[0] = is_first[0] and not isinstance(event, Delta)
            self._due.append((sink, event))
            if self._is_remote and isinstance(event, Started):  # before a round that may end the process
                self._hand_out()

        return Job(
            id=name,
            request=request,
            sink=deliver,
            stream=TextStream(
                self.tokenizer, request.stop, n_free=params.min_tokens, shown=request.shown
            ),
            sampler=sampler,
            eog=self.tokenizer.eog,
            n_ctx=limit,
            n_rows=most + info.n_overhang,
        )

    def _lose_rank(self, error: PyspecError) -> None:
        """Called on a thread of the ranks. If another process takes over, this one ends now."""
        if self._on_death is not None and not self._closing:
            self._on_death(error)
        with self._wake:
            self._lost = error
            self._wake.notify()

    # -- the engine's thread -------------------------------------------------------------------------------------

    def _run(self, has_begun: threading.Event) -> None:
        """Run one round after another; sleep while there is no work."""
        kernel_context.use(self._kernels)
        has_begun.set()
        try:
            while self._next():
                if not (self._is_parked and self.loop.is_idle):
                    self._round()
            if self._disk is not None:
                self._disk.flush(FLUSH_S)
            self._keep_learned()
            self._die(Unavailable("the engine was closed"))
        except PyspecError as e:
            self._die(e)
        except BaseException as e:  # no caller above would see it
            if _ENDING.is_set():  # thread pools that a round uses have ended
                self._die(Unavailable("the program is at its end"))
                return
            log.exception("the engine stops")
            self._die(failure_of(e, "the engine failed"))

    def _round(self) -> None:
        if self._lost is not None:
            raise self._lost
        self.step_began = time.monotonic()
        self.pace.begin(self.loop.next_rows)
        self.loop.step()
        self.pace.end(time.monotonic() - self.step_began)
        self.step_began, self._is_rested = 0.0, False
        if self._is_urgent or not self.loop.may_defer or not self.loop.is_busy:
            self._hand_out()
        if self._feed is not None:
            self._feed.send_news()
        self._trim(time.monotonic())
        if self.loop.is_idle:
            self.loop.check()  # after all events are delivered, because it may read every page

    def _trim(self, now: float) -> None:
        """Give freed memory back beside the rounds, if they have run for long without rest."""
        if now - self._trimmed > TRIM_S:
            self._trimmed = now
            threading.Thread(target=give_back_memory, name="pyspec-trim", daemon=True).start()

    def _next(self) -> bool:
        """Wait for work and take it in. Returns False if the engine was closed."""
        while not self._waited():
            self._rest()
        with self._wake:
            if self._closing:
                return False
            inbox, self._inbox = self._inbox, []
            for job in inbox:
                self._take_in(job)
            self._pass_slot_tasks()
            move = self._move if self.loop.is_idle else None
        if move is not None:
            self._end_move(*move)
        return True

    def _end_move(self, work: Callable[[], None], end: Future[None]) -> None:
        """Park or wake. An error of the device ends the engine, as one of a round does."""
        try:
            work()
            if self._feed is not None:
                self._feed.send_news()
        except BaseException as e:
            self._move = None
            error = e if isinstance(e, PyspecError) else failure_of(e, "parking or waking failed")
            end.set_exception(error)
            if isinstance(error, DeviceError):
                raise error from e
            return
        self._move, self._is_rested = None, False
        end.set_result(None)

    def _waited(self) -> bool:
        """Wait for work; False after REST_S without any, if that is news."""
        with self._wake:
            if self._is_rested:
                self._wake.wait_for(lambda: self._has_news() or not self._is_rested)
            return self._wake.wait_for(self._has_news, REST_S)

    def _rest(self) -> None:
        self._keep_learned()
        here.kept.clear()
        give_back_memory()
        self.on_rest()
        self._is_rested, self._trimmed = True, time.monotonic()

    def _keep_learned(self) -> None:
        if self._learned is not None:
            try:
                self._learned.keep()
            except Exception:  # it is worth no request
                log.exception("what was learned is not kept for the next start")
                self._learned = None

    def _pass_slot_tasks(self) -> None:
        tasks, self._slot_tasks = self._slot_tasks, []
        for task in tasks:
            self.loop.add_slot_task(task)

    def _nudge(self) -> None:
        """Called on another thread: the loop has something to do."""
        with self._wake:
            self._wake.notify()

    def _has_news(self) -> bool:
        return bool(
            self._inbox
            or self._slot_tasks
            or self._move
            or self._closing
            or self._lost
            or not self.loop.is_idle
        )

    def _take_in(self, job: Job) -> None:
        """Queue a job. A failure here ends only this job."""
        try:
            if job.flaw is None:
                self.loop.submit(job)
                return
        except Exception as e:
            log.exception("request %s could not be taken in", job.id)
            job.flaw = blamed(e)
        self.loop.reject(job, job.flaw)

    def _hand_out(self) -> None:
        """Deliver events to listeners. Listeners wake other threads, which want the GIL: events that are not urgent are delivered
        while the device runs the next round."""
        self._is_urgent = False
        if self._due:
            due, self._due = self._due, []
            self._deliver(due)

    def _call_listeners(self, due: Due) -> None:
        """Call listeners. They are the caller's code (of a closed event loop, say): any exception ends only the listener's request,
        SystemExit and GeneratorExit included."""
        for sink, event in due:
            try:
                sink(event)
            except BaseException:
                if event.request not in self._failed_listeners:
                    log.exception("the listener of request %s failed", event.request)
                self._failed_listeners.add(event.request)
                if (job := self._jobs.get(event.request)) is not None:
                    self.loop.cancel(job)
            if isinstance(event, Done | Failed):
                self._failed_listeners.discard(event.request)

    def _die(self, error: PyspecError) -> None:
        if self._on_death is not None and not self._closing:
            self._on_death(error)
        if self._feed is not None:
            self._feed.end()
        with self._wake:
            self._error = error
            lost, self._inbox = self._inbox, []
            move, self._move = self._move, None
            self._pass_slot_tasks()
        if move is not None:
            move[1].set_exception(error)
        for job in lost:
            self.loop.submit(job)
        self.loop.abort(error)
        if self._disk is not None:
            self._disk.close()
        self._hand_out()
        self.loop.on_wait = lambda: (
            None
        )  # breaks the cycle of loop and core, which would keep the loop's memory

    # -- for people and dashboards -------------------------------------------------------------------------------

    def slots(self) -> list[SlotInfo]:
        """One row per slot; a round may pass while it is read."""
        return self.loop.slot_rows(self.info.n_ctx)

    def metrics(self) -> Metrics:
        """Counters of the loop, with gauges of its pages, cache and queue."""
        return self.loop.metrics(len(self._inbox) + self.grammars.n_waiting)

    def replicas(self, *, counts: bool = True) -> list[ReplicaInfo]:
        return []

    def in_listener(self) -> bool:
        return threading.current_thread() is self._thread

    def alive(self) -> bool:
        return self._error is None and self._thread.is_alive()

    def state(self) -> str:
        return "ok" if self.alive() else "stopped"

    def close(self, limit_s: float = CLOSE_S) -> bool:
        """Stop the thread; running requests fail with Unavailable. Memory is freed with the last reference.

        Returns False if a round did not end within `limit_s`; the thread ends with the process.
        """
        if os.getpid() != self._pid:
            return True  # a fork has no such thread, and perhaps a lock that stays closed
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                log.error(
                    "the engine does not stop: a round has been under way for more than %.0f s", limit_s
                )
                return False
        if self._disk is not None and threading.current_thread() is not self._thread:
            self._disk.join(limit_s)
        self.loop.leave()
        if self._ranks is not None:
            self._ranks.close()
        _RUNNING.discard(self)
        return True


def _begin_to_end() -> None:
    """Thread pools that a round uses end next. Let failures pass instead of blaming requests."""
    _ENDING.set()
    for core in list(_RUNNING):
        core.loop.raises_bugs = True


getattr(threading, "_register_atexit", atexit.register)(_begin_to_end)


@atexit.register
def _close_all() -> None:
    """Close all engines: a thread inside the device's library would crash the process when the interpreter ends."""
    for core in list(_RUNNING):
        core.close()


def _refuse_fork() -> None:
    """Refuse a fork of a process that has loaded an engine: torch's threads do not survive it, and its first product would hang."""
    here = os.getpid()
    if not _LOADED_IN:
        _LOADED_IN.append(here)
    elif _LOADED_IN[0] != here:
        raise Unavailable(
            f"an engine was loaded in process {_LOADED_IN[0]}, and its threads and device do not survive a fork: "
            f"in process {here} load one with isolated=True, or start that with spawn"
        )
