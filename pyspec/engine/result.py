"""Results of finished requests, and many requests side by side. No torch."""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ParamSpec, TypeVar

from pyspec.errors import PyspecError, QueueFull, TimedOut
from pyspec.ranges import Doc
from pyspec.request import (
    Delta,
    Done,
    Event,
    Failed,
    Finish,
    FinishReason,
    Request,
    Timings,
    TokenLogprob,
    finish_reason,
)

P = ParamSpec("P")
T = TypeVar("T")
Submit = Callable[[Request, Callable[[Event], None]], str]
Cancel = Callable[[str], None]
Progress = Callable[[int, int], None]
"""Called with the number of requests that have ended, and of all."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation."""

    # fmt: off
    text: Annotated[str, Doc("all of it, without the stop string")]
    tokens: Annotated[tuple[int, ...], Doc("tokens that are in `text` as a whole: no end-of-generation token and no token of the stop string; `n_predicted` counts those, and deltas have the latter")]
    finish: Annotated[Finish, Doc("eos: the model ended it; stop: a stop string; length: a limit of tokens, time or context; cancelled")]
    n_prompt: Annotated[int, Doc("tokens of the prompt")]
    n_predicted: Annotated[int, Doc("tokens generated")]
    timings: Annotated[Timings, Doc("times and counts")]
    logprobs: Annotated[tuple[TokenLogprob, ...], Doc("of `tokens`, if requested")] = ()
    stop: Annotated[str, Doc("the stop string that ended it")] = ""
    slot: Annotated[int, Doc("where it ran")] = -1
    seed: Annotated[int, Doc("of its random draws, given or drawn: the same request with it gives the same text; -1: unknown")] = -1
    # fmt: on

    @property
    def finish_reason(self) -> FinishReason:
        """`finish` in the words of OpenAI's clients: "stop", "length", or "tool_calls" if a chat's answer ended with calls."""
        return finish_reason(self.finish)


def collect(events: Iterable[Delta | Done]) -> Result:
    """Join a request's deltas."""
    text: list[str] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    done: Done | None = None
    for event in events:
        if isinstance(event, Delta):
            text.append(event.text)
            tokens += event.tokens
            logprobs += event.logprobs
        else:
            done = event
    assert done is not None, "a request ended without its last event"
    n = max(0, len(tokens) - done.n_in_stop)
    return Result(
        "".join(text),
        tuple(tokens[:n]),
        done.finish,
        done.n_prompt,
        done.n_predicted,
        done.timings,
        tuple(logprobs[:n]),
        done.stop_string,
        done.slot,
        done.seed,
    )


class Deadline:
    """The end of a call's time, `timeout` seconds after it began. None: there is none."""

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    def left(self) -> float | None:
        """Seconds that are left, 0 at least; None: no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def error(self, last: Event | None = None, n_token: int = 0) -> TimedOut:
        """The error of a call that is over time. last: the last event of its request; n_token: tokens that it has got."""
        where = "while its prompt was read" if last else "before its request had a slot"
        where = f"after {n_token} tokens" if n_token else where
        return TimedOut(f"the call took longer than its timeout of {self.timeout:g} s; it ended {where}")


def patience() -> Iterator[float]:
    """Seconds between looks at a queue that others fill."""
    wait = 0.005
    while True:
        yield wait
        wait = min(2 * wait, 0.1)


def submit_when_free(
    submit: Submit, request: Request, sink: Callable[[Event], None], deadline: Deadline
) -> str:
    """Call `submit`; wait while the queue is full. Raises TimedOut."""
    for seconds in patience():
        try:
            return submit(request, sink)
        except QueueFull:
            left = deadline.left()
            if left == 0:
                raise deadline.error() from None
            time.sleep(seconds if left is None else min(seconds, left))
    raise AssertionError("patience ends")


class RequestSet:
    """Requests that run side by side, a limited number at once; the others wait here, not in the queue.

    keep_going  put a failed request's error in its place; else raise it, and end the others
    deadline    of all of them
    """

    def __init__(
        self,
        requests: Sequence[Request | PyspecError],
        progress: Progress | None,
        keep_going: bool,
        deadline: Deadline | None = None,
    ) -> None:
        self.requests, self.deadline = requests, deadline or Deadline()
        self.progress = progress
        self.keep_going = keep_going
        self._events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._received: list[list[Delta | Done]] = [[] for _ in requests]
        self._failed: dict[int, PyspecError] = {}
        self._names: dict[int, str] = {}  # of running ones
        self._n_done = 0

    def run(self, submit: Submit, cancel: Cancel, n_at_once: int) -> list[Result | PyspecError]:
        """Run all requests. Returns their results in order."""
        todo = deque(range(len(self.requests)))
        try:
            while todo or self._names:
                while todo and len(self._names) < n_at_once and self._begin(todo[0], submit):
                    todo.popleft()
                if self._names:
                    try:
                        event = self._events.get(timeout=self.deadline.left())
                    except queue.Empty:
                        self._out_of_time([*self._names, *todo], cancel)
                        break
                    self._on_event(*event)
        finally:
            for name in self._names.values():
                cancel(name)
        return [
            self._failed[i] if i in self._failed else collect(own)
            for i, own in enumerate(self._received)
        ]

    def _out_of_time(self, rest: Sequence[int], cancel: Cancel) -> None:
        """End the requests that are not done."""
        for i in rest:
            if i in self._names:
                cancel(self._names[i])
            got = self._received[i]
            n_token = sum(len(event.tokens) for event in got if isinstance(event, Delta))
            self._ended(i, self.deadline.error(got[-1] if got else None, n_token))

    def _begin(self, i: int, submit: Submit) -> bool:
        """Submit request `i`. Returns False if the queue is full and one of ours will end first."""
        request = self.requests[i]
        try:
            if isinstance(request, PyspecError):
                raise request
            send = submit if self._names else partial(submit_when_free, submit, deadline=self.deadline)
            self._names[i] = send(request, partial(self._put, i))
        except QueueFull:
            return False
        except PyspecError as e:
            self._ended(i, e)
        return True

    def _put(self, i: int, event: Event) -> None:
        self._events.put((i, event))

    def _on_event(self, i: int, event: Event) -> None:
        if isinstance(event, Failed):
            self._ended(i, event.error)
        elif isinstance(event, Delta | Done):
            self._received[i].append(event)
            if isinstance(event, Done):
                self._ended(i, None)

    def _ended(self, i: int, error: PyspecError | None) -> None:
        self._names.pop(i, None)
        if error is not None:
            if not self.keep_going:
                raise error
            self._failed[i] = error
        self._n_done += 1
        if self.progress is not None:
            self.progress(self._n_done, len(self.requests))


async def in_time(deadline: Deadline, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `make` on a thread. Raises its error, or TimedOut where it takes longer."""
    try:
        async with asyncio.timeout(deadline.left()):
            return await asyncio.to_thread(make, *args, **kwargs)
    except TimeoutError as e:
        raise (e if isinstance(e, PyspecError) else deadline.error()) from None
