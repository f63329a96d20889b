"""A Core whose engines are elsewhere, behind a function that runs one request. Which engine runs it is that function's choice.

It keeps the delivered tokens of every request, as a supervisor does: if a run breaks off, the next one continues it. No torch here.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pyspec.engine.messages import unpack
from pyspec.engine.process.supervised_request import Sink, SupervisedRequest
from pyspec.errors import NotSupported, PyspecError, QueueFull, RequestError, Unavailable
from pyspec.repeats import limited
from pyspec.request import Done, EngineInfo, Event, Failed, Metrics, ReplicaInfo, Request, SlotInfo
from pyspec.sample.noise import resolve_seed
from pyspec.slot_action import SlotAction, SlotAnswer
from pyspec.slots.images import routed
from pyspec.text.tokenizer import Tokenizer

log = limited(__name__)

N_ATTEMPT = 6  # runs of a request that break off one after the other without a new token
PAUSE_S = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0)  # before each run after one that broke off

Packed = Sequence[tuple[Any, ...]]
"""Events of a request as `messages.pack` makes them."""


@dataclass(frozen=True)
class Call:
    """A request on its way to an engine.

    prompt  the prompt's tokens as characters: routers that compare the beginnings of texts then compare tokens
    """

    prompt: str
    request: Request


class RemoteRun(Protocol):
    """The answer to a call: events as they come, the last of which ends the request."""

    def __aiter__(self) -> AsyncIterator[Packed]: ...

    def cancel(self) -> None:
        """Nothing of it is wanted any more."""
        ...


class RemoteCore:
    """Runs each request by one call of `run`, and by further ones if that breaks off. Safe to call from any thread.

    full  errors of `run` that mean that too many requests wait
    """

    def __init__(
        self,
        run: Callable[[Call], RemoteRun],
        info: EngineInfo,
        tokenizer: Tokenizer,
        full: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._run, self.info, self.tokenizer, self._full = run, info, tokenizer, full
        self._records: dict[str, SupervisedRequest] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ids = itertools.count(1)
        self._counts = Metrics()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pyspec-calls", daemon=True)
        self._thread.start()

    # -- for callers ---------------------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink) -> str:
        """See Engine.submit."""
        if self._is_closed:
            raise Unavailable("the engine has stopped: it was closed")
        if request.slot >= 0:
            raise RequestError(
                "id_slot: several engines answer here, so a request can not choose a slot"
            )
        seed = resolve_seed(request.params.seed)
        record = SupervisedRequest(f"r{next(self._ids)}", request, seed, sink)
        self._records[record.name] = record
        self._loop.call_soon_threadsafe(self._begin, record)
        return record.name

    def cancel(self, name: str) -> None:
        """See Engine.cancel."""
        if (record := self._records.get(name)) is not None:
            record.cancelled = True
            self._loop.call_soon_threadsafe(self._end, name)

    def act_on_slot(self, action: SlotAction, on_answer: Callable[[SlotAnswer], None]) -> None:
        """Slots belong to engines that are not chosen by number."""
        on_answer(
            NotSupported("several engines answer here, and their slots can not be reached by number")
        )

    def slots(self) -> list[SlotInfo]:
        return []

    def replicas(self, *, counts: bool = True) -> list[ReplicaInfo]:
        return []

    def metrics(self) -> Metrics:
        """Figures of the requests that came through here. `restarts` are runs that broke off."""
        records = list(self._records.values())
        busy = sum(record.in_slot for record in records)
        return replace(self._counts, requests_processing=busy, requests_queued=len(records) - busy)

    def park(self) -> None:
        raise NotSupported("engines of other machines are not parked")

    def wake(self) -> None:
        raise NotSupported("engines of other machines are not parked")

    def in_listener(self) -> bool:
        return threading.current_thread() is self._thread

    def alive(self) -> bool:
        return not self._is_closed

    def state(self) -> str:
        return "stopped" if self._is_closed else "ok"

    def close(self, limit_s: float = 5.0) -> bool:
        """RemoteRun requests fail with Unavailable."""
        self._is_closed = True

        def end_all() -> None:
            for record in list(self._records.values()):
                self._pass_on(record, Failed(record.name, Unavailable("the engine was closed")))
                self._end(record.name)
            self._loop.call_soon(self._loop.stop)

        with suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(end_all)
        if not self.in_listener():
            self._thread.join(limit_s)
        return not self._thread.is_alive()

    # -- on the loop's thread ------------------------------------------------------------------------------------

    def _begin(self, record: SupervisedRequest) -> None:
        task = self._loop.create_task(self._serve(record))
        self._tasks[record.name] = task
        task.add_done_callback(lambda done: self._over(record, done))
        if record.cancelled:
            task.cancel()

    def _end(self, name: str) -> None:
        if (task := self._tasks.get(name)) is not None:
            task.cancel()

    def _over(self, record: SupervisedRequest, task: asyncio.Task[None]) -> None:
        """The task has ended: so does its request, if no event has ended it."""
        self._tasks.pop(record.name, None)
        if task.cancelled() or (error := task.exception()) is None:
            if record.name in self._records:
                self._pass_on(record, record.cancelled_event())
            return
        log.error("request %s failed", record.name, exc_info=error)
        self._pass_on(record, Failed(record.name, PyspecError(f"{type(error).__name__}: {error}")))

    async def _serve(self, record: SupervisedRequest) -> None:
        """Run a request until it has ended, by as many calls as that takes."""
        text, n_before, n_lost = (
            "".join(map(chr, routed(record.request.prompt, record.request.images))),
            0,
            0,
        )
        while True:
            why = await self._attempt(record, text)
            if record.name not in self._records:
                return
            n_lost = n_lost + 1 if len(record.tokens) == n_before else 1
            n_before = len(record.tokens)
            record.lose_engine(self.tokenizer)
            self._count(restarts=1)
            if n_lost >= N_ATTEMPT:
                error = Unavailable(f"{n_lost} engines were lost while this request ran: {why}")
                self._pass_on(record, Failed(record.name, error))
                return
            log.warning(
                "the engine of request %s is lost, another one continues it: %s", record.name, why
            )
            n = len(record.request.prompt) + n_before
            self._count(tokens_replayed=n if record.has_begun else 0)
            await asyncio.sleep(PAUSE_S[n_lost - 1])

    async def _attempt(self, record: SupervisedRequest, text: str) -> str:
        """One call. Returns the reason if it broke off."""
        submit = record.submit()
        params = replace(submit.request.params, seed=submit.seed)
        running: RemoteRun | None = None
        try:
            running = self._run(Call(text, replace(submit.request, params=params)))
            async for packed in running:
                for kind, _, *values in packed:
                    event = unpack((kind, record.name, *values))
                    if isinstance(event, Failed) and isinstance(event.error, Unavailable):
                        return str(event.error)  # that engine is ending
                    if (delivered := record.on_event(event)) is not None:
                        self._pass_on(record, delivered)
            return "its events ended"
        except asyncio.CancelledError:
            if running is not None:
                running.cancel()
            raise
        except self._full:
            self._pass_on(record, Failed(record.name, QueueFull(len(self._records))))
            return ""
        except Exception as e:  # noqa: BLE001 - the other side may be gone in many ways
            return f"{type(e).__name__}: {e}".splitlines()[0]

    def _pass_on(self, record: SupervisedRequest, event: Event) -> None:
        """Call the listener, whose exception ends its request only."""
        if isinstance(event, Done | Failed):
            if self._records.pop(record.name, None) is None:
                return
            self._count_end(event)
        try:
            record.sink(event)
        except Exception:
            if not record.is_logged:
                log.exception("the listener of request %s failed", record.name)
            record.is_logged = True
            self.cancel(record.name)

    def _count(self, **more: float) -> None:
        now = self._counts
        self._counts = replace(now, **{name: getattr(now, name) + n for name, n in more.items()})

    def _count_end(self, event: Done | Failed) -> None:
        if isinstance(event, Failed):
            self._count(requests_failed=1)
            return
        t = event.timings
        self._count(
            **{"requests_cancelled" if event.finish == "cancelled" else "requests_done": 1},
            prompt_tokens=t.prompt_n,
            prompt_tokens_cached=t.cache_n,
            prompt_seconds=1e-3 * t.prompt_ms,
            predicted_tokens=t.predicted_n,
            predicted_seconds=1e-3 * t.predicted_ms,
            rounds=t.n_rounds,
            draft_tokens=t.draft_n,
            accepted_tokens=t.draft_n_accepted,
        )
