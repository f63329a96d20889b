"""State shared by all endpoints: the engine, the settings, the text threads and the running submissions."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request as HTTPRequest

from pyspec.errors import PyspecError, QueueFull, Unavailable
from pyspec.heap import give_back_memory
from pyspec.server.api.prepared import PreparedBody
from pyspec.server.api.schema import AnyBody, validate
from pyspec.server.bridge import Post, Submission
from pyspec.server.engine import EngineLike
from pyspec.server.http.body import Reading, parse_object, read_body
from pyspec.server.http.gate import key_of
from pyspec.server.latency import Latencies
from pyspec.server.media import media_of
from pyspec.server.resume import StreamSessions
from pyspec.server.settings import ServerSettings
from pyspec.server.stream import while_connected

# -- text threads ----------------------------------------------------------------------------------------------------
# Fair order of text work: clients take turns by the thread time they have used.


class FairThreads:
    """A fixed number of text threads and their waiting clients. The client with the least used time goes next; its requests keep their order.

    A client that was idle starts at the current minimum, so it gains no credit, or at an equal share, which rises with all work: however
    many come, those that wait get their turn. Lives on one event loop.
    """

    def __init__(self, n: int) -> None:
        self._n_free = n
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._here: Counter[str] = Counter()  # waiting or running requests by client
        self._had_s: dict[str, float] = {}  # used time of these clients, in seconds
        self._share_s = 0.0  # of a client that was always here, if all had used the same

    async def take(self, client: str) -> None:
        """Wait for a thread. The caller must call `give` afterwards, unless this is cancelled."""
        if client not in self._had_s:
            self._had_s[client] = max(min(self._had_s.values(), default=0.0), self._share_s)
        self._here[client] += 1
        if self._n_free:
            self._n_free -= 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            # the thread was assigned before the cancellation
            if mine.done() and not mine.cancelled():
                self._next()
            else:
                self._remove(client, mine)
            self._leave(client)
            raise

    def give(self, client: str, seconds: float) -> None:
        """Return a thread after `seconds` of work for a client."""
        self._had_s[client] += seconds
        self._share_s += seconds / len(self._here)
        self._leave(client)
        self._next()

    def _next(self) -> None:
        while self._waiting:
            client = min(self._waiting, key=self._had_s.__getitem__)
            mine = self._waiting[client][0]
            self._remove(client, mine)
            if not mine.done():
                mine.set_result(None)
                return
        self._n_free += 1

    def _remove(self, client: str, mine: asyncio.Future[None]) -> None:
        line = self._waiting.get(client, deque())
        if mine in line:
            line.remove(mine)
            if not line:
                del self._waiting[client]

    def _leave(self, client: str) -> None:
        self._here[client] -= 1
        if not self._here[client]:
            del self._here[client], self._had_s[client]


T = TypeVar("T")
LONG_PROMPT = 8192  # tokens
LARGE_BODY = 64 << 10  # bytes
HUGE_BODY = 1 << 20  # after a body of this size, freed memory is returned to the system
CLOSED = "the model is unloaded, or the server ends"
KINDS = ("pyspec-text", "pyspec-large", "pyspec-compile", "pyspec-pictures")  # of threads
PICTURE_THREADS = 4  # pictures are read and resized by a library that lets other threads run
PICTURE = re.compile(rb'"(?:image|image_url|input_image|multimodal_data)"')


class OfLoop(NamedTuple):
    """What belongs to one event loop: the wake-ups of all submissions, and the queues for small bodies, large ones and grammars."""

    loop: asyncio.AbstractEventLoop
    post: Post
    turns: tuple[FairThreads, ...]


class Service:
    """One served engine. Lives on the event loop; only `text` work runs in threads."""

    def __init__(
        self, engine: EngineLike, settings: ServerSettings, sessions: StreamSessions | None = None
    ) -> None:
        """sessions: streams that outlive their connections, if other services share them"""
        self.engine = engine
        self.media = media_of(engine.info, settings)
        settings = settings if self.media is None else settings.for_pictures()
        self.settings = settings.for_model(engine.info.sampling)
        self.names = tuple(dict.fromkeys((*settings.aliases, engine.info.model_name)))
        self.model = self.names[0]
        self.sessions = sessions or StreamSessions(settings)
        self.started = time.time()
        self.latencies = Latencies()
        self.is_draining = False
        self._submissions: dict[Submission, asyncio.TimerHandle] = {}
        self.n_inside = 0
        self._inside: Counter[str] = Counter()  # requests by client
        # Threads for small bodies, for large ones, to compile grammars, and for bodies with pictures
        self._text: list[ThreadPoolExecutor | None] = [None] * len(KINDS)
        self.reading = Reading(self.settings.limits.reading)
        self._groups = count()
        self._of_loop: OfLoop | None = None

    @property
    def n_jobs(self) -> int:
        """Generation requests whose submissions are still open."""
        return len(self._submissions)

    async def text(
        self,
        work: Callable[..., T],
        *args: Any,
        n_byte: int = 0,
        client: str = "",
        compiles: bool = False,
        has_pictures: bool = False,
    ) -> T:
        """Run tokenising or rendering off the event loop. Large bodies, grammars and pictures have threads of their own, so small bodies never
        wait for them. Clients take turns. The threads start at the first call, because a mounted application gets no start-up event."""
        which = 3 if has_pictures else 2 if compiles else int(n_byte > LARGE_BODY)
        if (threads := self._text[which]) is None:
            n_thread = (self.settings.text_threads, 1, 1, PICTURE_THREADS)[which]
            threads = self._text[which] = ThreadPoolExecutor(n_thread, thread_name_prefix=KINDS[which])
        loop, turns = asyncio.get_running_loop(), self._here().turns[which]
        await turns.take(client)
        began = time.monotonic()
        try:
            running = loop.run_in_executor(threads, work, *args)
        except RuntimeError:  # `close` has ended them
            turns.give(client, 0.0)
            raise Unavailable(CLOSED) from None

        def end(done: asyncio.Future[T]) -> None:
            turns.give(client, time.monotonic() - began)
            if not done.cancelled():
                done.exception()  # mark the exception as retrieved: the client may have left

        running.add_done_callback(end)
        if n_byte > HUGE_BODY:
            with suppress(RuntimeError):
                threads.submit(give_back_memory)  # runs after this work: there is one such thread
        try:
            return await asyncio.shield(running)  # the thread finishes even if the client leaves
        except asyncio.CancelledError:
            if running.cancelled():  # by `close`
                raise Unavailable(CLOSED) from None
            raise

    async def body(self, request: HTTPRequest) -> bytes:
        """Read the body. A slow client blocks no other request; it only holds memory."""
        return await read_body(request, self.settings.limits, self.reading, self.client_of(request))

    async def on_body(self, request: HTTPRequest, work: Callable[[Service, bytes], T]) -> T:
        """Run `work` on the body in a text thread, while the request counts as admitted and its client is there."""
        raw, client = await self.body(request), self.client_of(request)
        with self.admitted(client):
            has_pictures = self.has_pictures(raw)
            done = self.text(work, self, raw, n_byte=len(raw), client=client, has_pictures=has_pictures)
            return await while_connected(done, request.receive)

    def has_pictures(self, raw: bytes) -> bool:
        """True if a body may have pictures that are to be read."""
        return self.media is not None and PICTURE.search(raw) is not None

    def checked(self, model: type[AnyBody], raw: bytes) -> AnyBody:
        """A body as its model. Raises RequestError."""
        return validate(model, parse_object(raw, self.settings.limits))

    def client_of(self, request: HTTPRequest) -> str:
        """The client's identity for fair queueing: its API key, else its address. "" over a unix socket."""
        if self.settings.api_keys and (key := key_of(request.headers)):
            return "key " + hashlib.sha256(key).hexdigest()[:16]
        return request.client.host if request.client is not None else ""

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run work off the event loop that may wait for another process."""
        return await asyncio.get_running_loop().run_in_executor(None, work, *args)

    def salt_of(self, client: str) -> str:
        """What a client's cached texts are named with, so that no other key finds them; "" if all share them."""
        return client if self.settings.divides else ""

    def check_ready(self) -> None:
        """Raise Unavailable while loading, draining or dead."""
        if self.is_draining:
            raise Unavailable("the server is shutting down")
        if not self.engine.alive():
            raise Unavailable("the model is not ready: it is loading or its engine has stopped")

    @contextmanager
    def admitted(self, client: str = "") -> Iterator[None]:
        """Count a request after its body has arrived, so that a flood is refused before parsing.

        The engine bounds its own queue; this bounds the requests that wait for tokenising, and complete answers. A client may hold at most
        three times the free places: three quarters if it is alone, and a new client always finds a place (dynamic thresholds, Choudhury and
        Hahne 1998).
        """
        info = self.engine.info
        n_free = most_inside(info.n_slot, info.n_queue) - self.n_inside
        if n_free <= 0 or (client and self._inside[client] >= 3 * n_free):
            raise QueueFull(self.n_inside)
        self.n_inside += 1
        self._inside[client] += 1
        try:
            yield
        finally:
            self.n_inside -= 1
            self._inside[client] -= 1
            self._inside += Counter()  # drops clients whose count is 0

    async def start(self, prepared: PreparedBody, client: str = "") -> Submission:
        """Submit the requests of `prepared`; the caller must call `end` afterwards. Raises RequestError, QueueFull, Unavailable."""
        group = f"{next(self._groups)}" if len(prepared.requests) > 1 else ""
        salt = self.salt_of(client)
        requests = (replace(r, client=client, cache_salt=salt, group=group) for r in prepared.requests)
        prepared = replace(prepared, requests=tuple(requests))
        # a complete answer is collected in memory anyway; only a stream waits for its reader
        submission = Submission(
            self.engine,
            self.settings.limits.stream_buffer if prepared.stream else 1 << 62,
            self._here().post,
            self.latencies,
        )
        if sum(len(request.prompt) for request in prepared.requests) < LONG_PROMPT:
            submission.submit(prepared.requests)
        else:
            await self._submit(submission, prepared)
        limit_s = self.settings.limits.total_s
        error = Unavailable(f"the request took longer than {limit_s:g} s")
        loop = asyncio.get_running_loop()
        self._submissions[submission] = loop.call_later(limit_s, submission.abort, error)
        return submission

    async def _submit(self, submission: Submission, prepared: PreparedBody) -> None:
        """Submit in a thread if the prompt is long: checking it takes milliseconds, and other clients' tokens pass through the loop."""
        submitting = asyncio.ensure_future(
            self.text(submission.submit, prepared.requests, client=prepared.requests[0].client)
        )
        try:
            await asyncio.shield(submitting)
        # the client left; a started submission can only be ended when it is complete
        except asyncio.CancelledError:

            def end(done: asyncio.Future[None]) -> None:
                if not done.cancelled():
                    done.exception()  # mark the exception as retrieved: the client has left
                submission.close()

            submitting.add_done_callback(end)
            raise

    def _here(self) -> OfLoop:
        """What belongs to this event loop; anew if the application moved to another one."""
        loop = asyncio.get_running_loop()
        if self._of_loop is None or self._of_loop.loop is not loop:
            turns = tuple(FairThreads(n) for n in (self.settings.text_threads, 1, 1, PICTURE_THREADS))
            self._of_loop = OfLoop(loop, Post(loop), turns)
        return self._of_loop

    def end(self, submission: Submission) -> None:
        """Remove a submission and cancel its running requests. Safe to call twice."""
        if timer := self._submissions.pop(submission, None):
            timer.cancel()
            submission.close()

    def abort_all(self, error: PyspecError) -> None:
        """End every submission with `error`, which its client receives."""
        for submission in list(self._submissions):
            submission.abort(error)

    def shut_down(self) -> None:
        """End every submission because the server is shutting down."""
        self.abort_all(Unavailable("the server is shutting down"))
        self.close()

    def close(self) -> None:
        """Stop the text threads; queued work is dropped."""
        for threads in self._text:
            if threads is not None:
                threads.shutdown(wait=False, cancel_futures=True)
        self._text = [None] * len(self._text)


def most_inside(n_slot: int, n_queue: int) -> int:
    """Requests that are let in at once: so many that three quarters of them fill all slots and all places to wait (policy/evict.py).

    n_queue  places to wait (`--queue`); short prompts and conversations that go on have as many again
    """
    return max(8 * n_slot + 32, -(-4 * (n_slot + 2 * n_queue) // 3))
