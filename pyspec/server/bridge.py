"""Events from the engine's thread to one coroutine, and cancellation of requests whose client has left.

The engine never waits for a client and does not pay per client: `Inbox.put` appends under a lock, and the first event of a
round wakes the event loop for all. A reader that leaves more than the limit unread loses its request; the engine loses no time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

from pyspec.errors import PyspecError, QueueFull, Unavailable
from pyspec.request import Delta, Done, Event, Failed, PromptLogprobs, Request
from pyspec.server.engine import EngineLike
from pyspec.server.latency import Latencies, RequestTimes

log = logging.getLogger(__name__)

Batch = list[tuple[int, Event]]
"""(choice, event) pairs in order."""
TakeAtOnce = Callable[[Batch], bool]
"""Takes a batch on the loop, without a task that wakes up for it. Returns False, and has taken nothing, if it can not."""

EVENT_COST, TOKEN_COST, LOGPROB_COST = 128, 8, 96
"""Approximate memory of a queued event, a token and a reported alternative, in bytes."""


def event_cost(event: Event) -> int:
    """Approximate bytes that an event holds while it waits."""
    if isinstance(event, PromptLogprobs):
        return EVENT_COST + LOGPROB_COST * sum(2 + len(entry.top) for entry in event.entries)
    if not isinstance(event, Delta):
        return EVENT_COST
    n_logprob = sum(1 + len(entry.top) for entry in event.logprobs)
    return EVENT_COST + len(event.text) + TOKEN_COST * len(event.tokens) + LOGPROB_COST * n_logprob


class Post:
    """Wakes one event loop for many inboxes. Any thread may call `announce`. A wake-up costs the engine a system call, so none is
    sent while the loop is still busy with earlier events."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._full: deque[Inbox] = deque()
        self._is_awake = False

    def announce(self, inbox: Inbox) -> None:
        """Schedule `inbox.wake` on the loop."""
        self._full.append(inbox)
        if not self._is_awake:
            self._is_awake = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no reader is left
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """Wake the announced inboxes, then run again after their readers, until no new inbox was announced."""
        if not self._full:
            self._is_awake = False
            # else an inbox was announced just before, and no other wake-up is pending
            if not self._full:
                return
            self._is_awake = True
        while self._full:
            self._full.popleft().wake()
        self._loop.call_soon(self._deliver)


class Inbox:
    """Events on their way to one coroutine. Any thread may call `put`; only the loop calls `take`; at most `limit` bytes wait."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limit: int,
        post: Post | None = None,
    ) -> None:
        self.overflow = asyncio.Event()
        self._loop = loop
        self._post = post or Post(loop)
        self._limit = limit
        self._lock = threading.Lock()
        self._events: list[tuple[int, Event]] = []
        self._size = 0
        self._is_full = False
        self._is_announced = False
        # its result: True if events may be waiting
        self._reader: asyncio.Future[bool] | None = None
        self._silence_s = self._deadline = 0.0
        self.at_once: TakeAtOnce = lambda batch: False
        self._alarm: asyncio.TimerHandle | None = None

    def put(self, choice: int, event: Event) -> None:
        """Add an event; never blocks. Past the limit all waiting events are dropped and `overflow` is set."""
        with self._lock:
            if self._is_full:
                return
            self._size += event_cost(event)
            if self._size > self._limit:
                self._is_full = True
                self._events.clear()
            else:
                self._events.append((choice, event))
            if self._is_announced:
                return
            self._is_announced = True
        self._post.announce(self)

    def wake(self) -> None:
        """Wake the reader. Called on the loop."""
        with self._lock:
            self._is_announced = False
            is_full = self._is_full
            (batch, self._events), (size, self._size) = (self._events, []), (self._size, 0)
        if is_full:
            self.overflow.set()
        if batch and not self._hand_over(batch):
            with self._lock:
                if not self._is_full:
                    self._events[:0] = batch
                    self._size += size
            self._wake_reader(True)
        elif not batch:
            self._wake_reader(True)

    def _hand_over(self, batch: Batch) -> bool:
        """Have events taken at once, if their reader waits and so has nothing else to do."""
        if self._reader is None or self._reader.done():
            return False
        try:
            has_taken = self.at_once(batch)
        except Exception as e:  # noqa: BLE001 - the reader's, as if it had taken them
            self._reader.set_exception(e)
            return True
        if has_taken:
            self._deadline = self._loop.time() + self._silence_s
        return has_taken

    def _wake_reader(self, has_something: bool) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(has_something)

    async def take(self, timeout_s: float) -> Batch:
        """All waiting events; an empty list after `timeout_s` of silence. Raises Unavailable after an overflow."""
        self._silence_s, self._deadline = timeout_s, self._loop.time() + timeout_s
        if self._alarm is None or self._alarm.when() > self._deadline:
            self.close()
            self._alarm = self._loop.call_at(self._deadline, self._ring)
        while not (batch := self._empty()):  # a wake-up may arrive after its events were taken
            self._reader = self._loop.create_future()
            if not await self._reader:
                break
        return batch

    def _ring(self) -> None:
        """Set the alarm once and move it when it fires too early: most streams are never silent that long."""
        if self._loop.time() >= self._deadline:
            self._alarm = None
            self._wake_reader(False)
        else:
            self._alarm = self._loop.call_at(self._deadline, self._ring)

    def close(self) -> None:
        """Stop reading and cancel the alarm."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _empty(self) -> Batch:
        with self._lock:
            if self._is_full:
                raise Unavailable(
                    f"more than {self._limit} bytes waited to be read; the request was aborted",
                )
            batch, self._events = self._events, []
            self._size = 0
        return batch


def _lost_its_place(event: Event) -> bool:
    return isinstance(event, Failed) and isinstance(event.error, QueueFull)


class Submission:
    """The engine requests behind one HTTP request. `close` cancels those that still run; call it exactly once, at the end.

    A list of prompts may be longer than the engine's queue has room for: only the first one must find room, the others are
    submitted as earlier ones end.
    """

    def __init__(
        self,
        engine: EngineLike,
        limit: int,
        post: Post | None = None,
        latencies: Latencies | None = None,
    ) -> None:
        self._engine = engine
        self._latencies = latencies or Latencies()
        self._inbox = Inbox(asyncio.get_running_loop(), limit, post)
        self._todo: deque[tuple[int, Request]] = deque()
        self._ids: dict[int, str] = {}
        self._open: set[int] = set()
        self._waiting: dict[int, Request] = {}  # requests that have no slot yet

    @property
    def overflow(self) -> asyncio.Event:
        """Set when the reader was too slow; the events are gone."""
        return self._inbox.overflow

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit the first requests. If one is refused, cancel the others and raise its error."""
        self._todo.extend(enumerate(requests))
        try:
            self._feed()
        except PyspecError:
            self.close()
            raise

    def _feed(self) -> None:
        """Submit as many requests as the engine accepts now; the rest wait until one of this submission ends."""
        while self._todo:
            i, request = self._todo[0]
            # leave room in the queue for other clients
            if len(self._open) >= 2 * self._engine.info.n_slot:
                return
            try:
                sink = partial(self._on_event, i, self._latencies.request())
                self._ids[i] = self._engine.submit(request, sink)
            except QueueFull:
                if self._open:
                    return
                raise
            self._open.add(i)
            self._waiting[i] = self._todo.popleft()[1]

    def take_at_once(self, take: TakeAtOnce) -> None:
        """From now on, tokens are handed to `take` while the reader of `batches` waits. It gets all else, and what is not taken."""

        def at_once(batch: Batch) -> bool:
            if self._waiting or self._todo:
                return False
            are_tokens = all(type(event) is Delta and choice in self._open for choice, event in batch)
            return are_tokens and take(batch)

        self._inbox.at_once = at_once

    def _on_event(self, choice: int, times: RequestTimes, event: Event) -> None:
        times.observe(event)
        self._inbox.put(choice, event)

    async def batches(self, silence_s: float) -> AsyncGenerator[Batch, None]:
        """Events as they come, until every choice has ended; an empty batch after `silence_s` without events."""
        while self._open:
            batch: Batch = []
            for choice, event in await self._inbox.take(silence_s):
                if choice not in self._open:  # aborted here before the engine's last event
                    continue
                waiting = self._waiting.pop(choice, None)
                if isinstance(event, Done | Failed):
                    self._open.discard(choice)
                if waiting is not None and _lost_its_place(event) and self._open:
                    # wait again, as if the queue had been full
                    self._todo.append((choice, waiting))
                else:
                    batch.append((choice, event))
            try:
                self._feed()
            except PyspecError as error:
                batch.append((self._todo[0][0], Failed("", error)))
                self._todo.clear()
            yield batch

    def abort(self, error: PyspecError) -> None:
        """Cancel the requests that still run and raise `error` in the reader. Called on the loop."""
        self._todo.clear()
        for choice in sorted(self._open):
            self._engine.cancel(self._ids[choice])
            self._inbox.put(choice, Failed(self._ids[choice], error))

    def close(self) -> None:
        """Cancel all requests that have not ended. Safe to call twice."""
        self._todo.clear()
        self._inbox.close()
        for choice in sorted(self._open):
            self._engine.cancel(self._ids[choice])
        self._open.clear()
