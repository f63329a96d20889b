"""Run one submission to its end: collected into one answer, or streamed as server-sent events.

Both watch the client. When it leaves, even during prefill, the submission is closed and its slots are freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from pyspec.errors import PyspecError, Unavailable
from pyspec.request import Done, Event, Failed
from pyspec.server.api.answers import Answer, unfinished
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


def head(more: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """The headers of a stream."""
    return [*HEADERS, *((name.lower().encode(), value.encode()) for name, value in more.items())]


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


async def gather(submission: Submission, answer: Answer, silence_s: float) -> None:
    """Let all choices of an answer come. Raises the error of the first failing one."""
    async with contextlib.aclosing(submission.batches(silence_s)) as batches:
        async for batch in batches:
            for i, event in batch:
                if error := failure(event):
                    raise error
                answer.choices[i].apply(event, keep=True)


def failure(event: Event) -> PyspecError | None:
    """The error that an event ends its request with, or None."""
    if isinstance(event, Failed):
        return event.error
    return unfinished(event) if isinstance(event, Done) else None


async def chunks(submission: Submission, ping_s: float, answer: Answer) -> AsyncGenerator[bytes, None]:
    """The submission's events as bytes to send; events that arrive together form one piece. Errors become an event, too.

    ping_s  silence after which the answer's ping is sent
    """
    async with contextlib.aclosing(submission.batches(ping_s)) as batches:
        async for batch in batches:
            for n, (_, event) in enumerate(batch):
                if error := failure(event):
                    log.warning("a stream ended with an error: %s", error)
                    yield answer.encode(batch[:n]) + answer.error(error)
                    return
            yield answer.encode(batch) if batch else answer.ping
    yield answer.tail()


async def send_parts(send: Send, source: AsyncGenerator[bytes, None]) -> None:
    """Send the body of an answer, part by part."""
    async with contextlib.aclosing(source):
        async for data in source:
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream:
    """Server-sent events of one submission: `source`, and what its connection takes without a task (PARTS).

    Ends early if the client leaves or reads too slowly. Calls `on_end` once.
    """

    def __init__(
        self,
        submission: Submission,
        source: AsyncGenerator[bytes, None],
        on_end: Callable[[], None],
        answer: Answer,
        headers: Mapping[str, str],
    ) -> None:
        self._headers = head(headers)
        self._submission, self._source = submission, source
        self._on_end, self._answer = on_end, answer
        self._is_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts: GuardedProtocol | None = scope.get("state", {}).get(PARTS)
        if parts is not None:
            self._submission.take_at_once(partial(self._write, parts))
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

    def _write(self, parts: GuardedProtocol, batch: Batch) -> bool:
        """Write tokens to a connection with room for them."""
        if not parts.has_room:
            return False
        if data := self._answer.encode(batch):
            parts.write_part(data)
        return True

    async def _send_last(self, send: Send) -> None:
        """Send the error event of an aborted answer. A slow client may still read it; a client that is gone is not waited for."""
        if not self._is_begun:
            await self._begin(send)
        error = Unavailable("the answer was read more slowly than written; the request was aborted")
        body = self._answer.error(error)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _begin(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        self._is_begun = True

    async def _send_all(self, send: Send) -> None:
        await self._begin(send)
        await send_parts(send, self._source)
