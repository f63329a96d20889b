"""Run one submission to its end: collected into one answer, or streamed as server-sent events.

Both watch the client. When it leaves, even during prefill, the submission is closed and its slots are freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from pyspec.errors import PyspecError, Unavailable
from pyspec.request import Delta, Done, Event, Failed, Progress, Started
from pyspec.server.api.answers import Answer, Choice, unfinished
from pyspec.server.api.prepared import PreparedBody
from pyspec.server.bridge import Batch, Submission
from pyspec.server.http.body import ClientGone
from pyspec.server.http.connections import PARTS, GuardedProtocol

log = logging.getLogger(__name__)

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks a proxy to forward events at once
]
T = TypeVar("T")


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`, or ClientGone as soon as the client disconnects; `work` is then cancelled.

    The body must have been read before: from then on `receive` returns only the disconnect.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await stop_task(task)
        await stop_task(watch)


async def disconnected(receive: Receive) -> None:
    """Wait until the client has left. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def stop_task(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for it; does nothing if it has ended."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # mark as retrieved, so that asyncio does not warn


async def gather(submission: Submission, prepared: PreparedBody, silence_s: float) -> list[Choice]:
    """All choices of a submission, complete. Raises the error of the first failing one."""
    choices = [Choice() for _ in prepared.requests]
    async with contextlib.aclosing(submission.batches(silence_s)) as batches:
        async for batch in batches:
            for i, event in batch:
                if error := failure(event):
                    raise error
                choices[i].apply(event, keep=True)
    return choices


def failure(event: Event) -> PyspecError | None:
    """The error that an event ends its request with, or None."""
    if isinstance(event, Failed):
        return event.error
    return unfinished(event) if isinstance(event, Done) else None


async def chunks(
    submission: Submission,
    prepared: PreparedBody,
    answer: Answer,
    choices: Sequence[Choice],
) -> AsyncGenerator[bytes, None]:
    """The submission's events as bytes to send; events that arrive together form one piece. Errors become an event, too. choices: new ones."""
    async with contextlib.aclosing(submission.batches(prepared.ping_s)) as batches:
        async for batch in batches:
            parts: list[bytes] = []
            for i, event in batch:
                if error := failure(event):
                    log.warning("a stream ended with an error: %s", error)
                    yield b"".join([*parts, answer.error(error)])
                    return
                parts.append(_encode(i, event, choices[i], prepared, answer))
            yield b"".join(parts) if batch else answer.ping
    yield answer.tail(choices)


def encoder(
    prepared: PreparedBody, answer: Answer, choices: Sequence[Choice]
) -> Callable[[Batch], bytes]:
    """Makes one piece of tokens that arrive together, as `chunks` does beside it."""

    def encode(batch: Batch) -> bytes:
        return b"".join([_encode(i, event, choices[i], prepared, answer) for i, event in batch])

    return encode


def _encode(i: int, event: Event, choice: Choice, prepared: PreparedBody, answer: Answer) -> bytes:
    choice.apply(event, keep=False)
    if isinstance(event, Delta):
        return answer.delta(i, choice, event)
    if isinstance(event, Done):
        return answer.finish(i, choice)
    if isinstance(event, Started):
        progress = Progress(event.request, event.n_prompt, event.n_cached, event.n_cached, 0.0)
        progress_event = answer.progress(i, progress) if prepared.return_progress else b""
        return answer.opening(i, choice) + progress_event
    if not prepared.return_progress or not isinstance(event, Progress):
        return b""
    if event.n_processed > event.n_cached:
        return answer.progress(i, event)
    return b""


class EventStream:
    """Server-sent events of one submission. Ends early if the client leaves, or reads too slowly (then with `too_slow`); calls `on_end` once.

    encode  makes bytes of tokens, for a connection that takes them without a task (PARTS)
    """

    def __init__(
        self,
        submission: Submission,
        source: AsyncGenerator[bytes, None],
        on_end: Callable[[], None],
        too_slow: Callable[[PyspecError], bytes],
        headers: Mapping[str, str] | None = None,
        encode: Callable[[Batch], bytes] | None = None,
    ) -> None:
        self._encode = encode
        self._headers = [
            *HEADERS,
            *((name.lower().encode(), value.encode()) for name, value in (headers or {}).items()),
        ]
        self._submission = submission
        self._source = source
        self._on_end, self._too_slow = on_end, too_slow
        self._is_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts: GuardedProtocol | None = scope.get("state", {}).get(PARTS)
        if parts is not None and self._encode is not None:
            self._submission.take_at_once(partial(self._write, parts, self._encode))
        sending = asyncio.ensure_future(self._send_all(send))
        left = asyncio.ensure_future(disconnected(receive))
        overflow = asyncio.ensure_future(self._submission.overflow.wait())
        try:
            await asyncio.wait({sending, left, overflow}, return_when=asyncio.FIRST_COMPLETED)
            if self._submission.overflow.is_set():
                log.warning("a client reads too slowly; its request was aborted")
                self._on_end()  # free the slot now, even if the client reads on later
                await stop_task(sending)
                sending = asyncio.ensure_future(self._send_last(send))
                await asyncio.wait({sending, left}, return_when=asyncio.FIRST_COMPLETED)
            elif sending.done():
                sending.result()
        finally:
            self._on_end()
            for task in (sending, left, overflow):
                await stop_task(task)

    @staticmethod
    def _write(parts: GuardedProtocol, encode: Callable[[Batch], bytes], batch: Batch) -> bool:
        """Write tokens to a connection with room for them."""
        if not parts.has_room:
            return False
        if data := encode(batch):
            parts.write_part(data)
        return True

    async def _send_last(self, send: Send) -> None:
        """Send the error event of an aborted answer. A slow client may still read it; a client that is gone is not waited for."""
        if not self._is_begun:
            await self._begin(send)
        error = Unavailable("the answer was read more slowly than written; the request was aborted")
        body = self._too_slow(error)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _begin(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        self._is_begun = True

    async def _send_all(self, send: Send) -> None:
        await self._begin(send)
        async with contextlib.aclosing(self._source) as source:
            async for data in source:
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
