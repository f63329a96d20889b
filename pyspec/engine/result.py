"""Results of finished requests, and many requests side by side. No torch."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pyspec.errors import PyspecError, QueueFull
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

Submit = Callable[[Request, Callable[[Event], None]], str]
Cancel = Callable[[str], None]
Progress = Callable[[int, int], None]
"""Called with the number of requests that have ended, and of all."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation.

    tokens    tokens that are in `text` as a whole: no end-of-generation token and no token of the stop string; `n_predicted` and
              deltas include those
    logprobs  of `tokens`, if requested
    """

    text: str
    tokens: tuple[int, ...]
    finish: Finish
    n_prompt: int
    n_predicted: int
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()
    stop: str = ""
    slot: int = -1

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
    )


def patience() -> Iterator[float]:
    """Seconds between looks at a queue that others fill."""
    wait = 0.005
    while True:
        yield wait
        wait = min(2 * wait, 0.1)


def submit_when_free(submit: Submit, request: Request, sink: Callable[[Event], None]) -> str:
    """Call `submit`; wait while the queue is full."""
    for seconds in patience():
        try:
            return submit(request, sink)
        except QueueFull:
            time.sleep(seconds)
    raise AssertionError("patience ends")


class RequestSet:
    """Requests that run side by side, a limited number at once; the others wait here, not in the queue.

    keep_going  put a failed request's error in its place; else raise it, and end the others
    """

    def __init__(
        self, requests: Sequence[Request | PyspecError], progress: Progress | None, keep_going: bool
    ) -> None:
        self.requests = requests
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
                    self._on_event(*self._events.get())
        finally:
            for name in self._names.values():
                cancel(name)
        return [
            self._failed[i] if i in self._failed else collect(own)
            for i, own in enumerate(self._received)
        ]

    def _begin(self, i: int, submit: Submit) -> bool:
        """Submit request `i`. Returns False if the queue is full and one of ours will end first."""
        request = self.requests[i]
        try:
            if isinstance(request, PyspecError):
                raise request
            send = submit if self._names else partial(submit_when_free, submit)
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
