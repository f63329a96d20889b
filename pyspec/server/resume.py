"""Streams that outlive their connection: stored by conversation id and readable again from any byte, as in llama-server.

A generation whose client sent X-Conversation-Id continues after the client leaves. It ends by itself, by DELETE, or when the same
conversation starts another one. Its output is kept up to a limit of bytes (the oldest are dropped first) and for some time after its
end. A session belongs to the API key that started it; with another key it does not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from pyspec.errors import NotFound, QueueFull, RequestError, Unavailable
from pyspec.server.http.body import ClientGone
from pyspec.server.http.gate import key_of
from pyspec.server.settings import ServerSettings
from pyspec.server.stream import head, send_parts, while_connected

log = logging.getLogger(__name__)

MOST_ID = 512  # characters of a conversation's id


class SessionKey(NamedTuple):
    """A conversation and its owner. owner: a digest of the API key, empty if no key is needed."""

    owner: str
    conversation: str


def owner_of(headers: Headers, settings: ServerSettings) -> str:
    """The owner of a request: a digest of its API key."""
    return hashlib.sha256(key_of(headers)).hexdigest() if settings.api_keys else ""


def session_key(conversation: str, headers: Headers, settings: ServerSettings) -> SessionKey:
    """The key of a conversation's session. Raises RequestError if the id is too long."""
    if len(conversation) > MOST_ID:
        raise RequestError(
            f"a conversation's id of {len(conversation)} characters; at most {MOST_ID} are taken",
        )
    return SessionKey(owner_of(headers, settings), conversation)


class StreamSession:
    """The output of one generation, as bytes of its stream. Lives on the event loop."""

    def __init__(self, limit: int) -> None:
        self.started, self.completed = int(time.time()), 0  # 0: still running
        self.dropped = 0  # bytes that have been discarded
        self.pump: asyncio.Task[None] | None = None
        self._limit, self._kept, self._news = limit, bytearray(), asyncio.Event()

    @property
    def total(self) -> int:
        """Bytes written so far, including discarded ones."""
        return self.dropped + len(self._kept)

    def append(self, data: bytes) -> None:
        """Store more output; discard the oldest bytes beyond the limit."""
        self._kept += data
        if (over := len(self._kept) - self._limit) > 0:
            del self._kept[:over]
            self.dropped += over
        self._notify()

    def finish(self) -> None:
        """Mark the stream as complete. Safe to call twice."""
        self.completed = self.completed or int(time.time())
        self._notify()

    def _notify(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def read(self, at: int) -> AsyncGenerator[bytes, None]:
        """All bytes from `at` on, as they arrive. Ends early if the reader is so slow that its next byte was discarded."""
        while at >= self.dropped:
            if at < self.total:
                piece = bytes(self._kept[at - self.dropped :])
                at += len(piece)
                yield piece
            elif self.completed:
                return
            else:
                await self._news.wait()
        log.warning(
            "a client reads a kept stream too slowly: byte %d was dropped, the first kept one is %d",
            at,
            self.dropped,
        )


class StreamSessions:
    """All sessions, by key."""

    def __init__(self, settings: ServerSettings) -> None:
        self._limits = settings.limits
        self._sessions: dict[SessionKey, StreamSession] = {}
        self._coming: dict[SessionKey, asyncio.Future[None]] = {}

    def expect(self, key: SessionKey, ready: asyncio.Future[None]) -> None:
        """A conversation's generation begins when `ready` is done; a stop until then ends that with RequestError. An earlier one of the same conversation ends."""
        self.stop(key)
        self._coming[key] = ready

        def over(done: asyncio.Future[None]) -> None:
            if self._coming.get(key) is done:
                del self._coming[key]

        ready.add_done_callback(over)

    def begin(
        self,
        key: SessionKey,
        source: AsyncGenerator[bytes, None],
        on_end: Callable[[], None],
    ) -> StreamSession:
        """Store a generation's stream; an earlier one of the same conversation ends. Raises QueueFull if too many are running."""
        self.stop(key)
        if len(self._sessions) >= self._limits.kept_streams:
            ended = [k for k, s in self._sessions.items() if s.completed]
            if not ended:
                raise QueueFull(len(self._sessions))
            del self._sessions[min(ended, key=lambda k: self._sessions[k].completed)]
        session = self._sessions[key] = StreamSession(self._limits.kept_bytes)
        session.pump = asyncio.create_task(_pump(session, source))
        loop, limit_s = asyncio.get_running_loop(), self._limits.kept_s

        # also runs for a task that was cancelled before it started
        def over(task: asyncio.Task[None]) -> None:
            on_end()
            session.finish()
            loop.call_later(limit_s, self._forget, key, session)

        session.pump.add_done_callback(over)
        return session

    def _forget(self, key: SessionKey, session: StreamSession) -> None:
        if self._sessions.get(key) is session:
            del self._sessions[key]

    def get(self, key: SessionKey, at: int) -> StreamSession:
        """The session, readable from byte `at` on. Raises NotFound, RequestError, Unavailable before it begins."""
        session = self._sessions.get(key)
        if session is None and key in self._coming:
            raise Unavailable("the model of this conversation is not loaded yet; try again in a moment")
        if session is None:
            raise NotFound("no stream of this conversation is kept, or not any more")
        if at < session.dropped:
            raise RequestError(
                f"from: byte {at} is not kept any more; the first that is, is {session.dropped}",
            )
        return session

    def stop(self, key: SessionKey) -> None:
        """End a conversation's generation and delete its output. An unknown conversation is no error."""
        coming = self._coming.pop(key, None)
        if coming is not None and not coming.done():
            coming.set_exception(
                RequestError("a stop cancelled the request before its model was loaded")
            )
        session = self._sessions.pop(key, None)
        if session is not None and session.pump is not None:
            session.pump.cancel()
            session.finish()

    def rows(self, owner: str, conversations: Sequence[str]) -> list[dict[str, Any]]:
        """The sessions of these ids, and of `ID::model`; ids without a session are left out."""
        return [
            {
                "conversation_id": key.conversation,
                "is_done": session.completed > 0,
                "total_bytes": session.total,
                "started_at": session.started,
                "completed_at": session.completed,
            }
            for wanted in conversations
            for key, session in self._sessions.items()
            if wanted and key.owner == owner and (key.conversation + "::").startswith(wanted + "::")
        ]


async def _pump(session: StreamSession, source: AsyncGenerator[bytes, None]) -> None:
    try:
        async with contextlib.aclosing(source):
            async for data in source:
                session.append(data)
    except Exception:
        log.exception("a kept stream failed")


class ReplayStream:
    """Server-sent events of a session from a byte on, until it ends or the client leaves. The generation does not end with the client."""

    def __init__(
        self,
        session: StreamSession,
        at: int,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._session, self._at, self._headers = session, at, head(headers or {})

    @property
    def pump(self) -> asyncio.Task[None] | None:
        """The generation, which may go on when the client has left."""
        return self._session.pump

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await while_connected(self._send_all(send), receive)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send_parts(send, self._session.read(self._at))
