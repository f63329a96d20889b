"""What all endpoints share: the engine, the settings, the text threads and the submissions that run now."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

from starlette.requests import Request as HTTPRequest

from pyspec.errors import PyspecError, QueueFull, Unavailable
from pyspec.heap import give_back_memory
from pyspec.server.api.ask import Ask
from pyspec.server.bridge import Post, Submission
from pyspec.server.engine import EngineLike
from pyspec.server.http.body import Reading, read_body
from pyspec.server.http.gate import key_of
from pyspec.server.latency import Latencies
from pyspec.server.resume import StreamSessions
from pyspec.server.settings import ServerSettings
from pyspec.server.text_turns import TextTurns

T = TypeVar("T")
LONG_PROMPT = 8192  # tokens
LARGE_BODY = 64 << 10  # bytes
HUGE_BODY = 1 << 20  # what work on these has taken of memory is given back to the system


class Service:
    """One engine being served. Lives on the event loop; only `text` work leaves it."""

    def __init__(self, engine: EngineLike, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings.for_model(engine.info.sampling)
        self.names = tuple(dict.fromkeys((*settings.aliases, engine.info.model_name)))
        self.model = self.names[0]
        self.sessions = StreamSessions(settings)
        self.started = time.time()
        self.latencies = Latencies()
        self.is_draining = False
        self._submissions: dict[Submission, asyncio.TimerHandle] = {}
        self.n_inside = 0
        self._inside: Counter[str] = Counter()  # of which by client
        self._text: list[ThreadPoolExecutor | None] = [
            None
        ] * 3  # for small bodies, for large ones, and to compile grammars
        self.reading = Reading(self.settings.limits.reading)
        self._groups = count()
        self._post: tuple[asyncio.AbstractEventLoop, Post] | None = None
        self._turns: tuple[asyncio.AbstractEventLoop, tuple[TextTurns, ...]] | None = None

    @property
    def n_jobs(self) -> int:
        """Generation requests whose submissions have not been closed."""
        return len(self._submissions)

    async def text(
        self, work: Callable[..., T], *args: Any, n_byte: int = 0, client: str = "", compiles: bool = False
    ) -> T:
        """Run tokenising or rendering off the event loop: of a large body in a thread of its own, so that small ones never wait for one.
        So is what compiles a grammar. Clients take turns. The threads start with the first call: a mounted application never hears of start-up."""
        which = 2 if compiles else int(n_byte > LARGE_BODY)
        if (threads := self._text[which]) is None:
            n, name = ((self.settings.text_threads, "pyspec-text"), (1, "pyspec-large"), (1, "pyspec-compile"))[which]
            threads = self._text[which] = ThreadPoolExecutor(n, thread_name_prefix=name)
        loop, turns = asyncio.get_running_loop(), self._one_turns()[which]
        await turns.take(client)
        began = time.monotonic()
        try:
            running = loop.run_in_executor(threads, work, *args)
        except RuntimeError:  # the server ends
            turns.give(client, 0.0)
            raise

        def end(done: asyncio.Future[T]) -> None:
            turns.give(client, time.monotonic() - began)
            if not done.cancelled():
                done.exception()  # seen, if the client has left

        running.add_done_callback(end)
        if n_byte > HUGE_BODY:
            with suppress(RuntimeError):
                threads.submit(give_back_memory)  # behind it: there is one such thread
        return await asyncio.shield(running)  # its thread goes on without a client

    async def body(self, request: HTTPRequest) -> bytes:
        """A request's body. Who has not sent all of it holds nobody up but for the memory it takes."""
        return await read_body(request, self.settings.limits, self.reading, self.client_of(request))

    def client_of(self, request: HTTPRequest) -> str:
        """Who asks, for the queue: the key, else the address. "" over a unix socket."""
        if self.settings.api_keys and (key := key_of(request.headers)):
            return "key " + hashlib.sha256(key).hexdigest()[:16]
        return request.client.host if request.client is not None else ""

    async def look(self, work: Callable[..., T], *args: Any) -> T:
        """Run what may have to ask another process, which may take its time to answer, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(None, work, *args)

    def check_ready(self) -> None:
        """Raise Unavailable while loading, draining or dead."""
        if self.is_draining:
            raise Unavailable("the server is shutting down")
        if not self.engine.alive():
            raise Unavailable("the model is not ready: it is loading or its engine has stopped")

    @contextmanager
    def admitted(self, client: str = "") -> Iterator[None]:
        """Count a request whose body is here, so that a flood is refused before it is parsed.

        The engine bounds its own queue; this bounds what waits to be tokenised for it. A client gets no more than three times what is left: alone
        three quarters, and however many fill the rest, there is a place for one who comes new (dynamic thresholds, Choudhury and Hahne 1998).
        """
        limit = 8 * self.engine.info.n_slot + 32
        if self.n_inside >= limit or (client and self._inside[client] >= 3 * (limit - self.n_inside)):
            raise QueueFull(self.n_inside)
        self.n_inside += 1
        self._inside[client] += 1
        try:
            yield
        finally:
            self.n_inside -= 1
            self._inside[client] -= 1
            self._inside += Counter()  # forgets whose number is 0

    async def start(self, ask: Ask, client: str = "") -> Submission:
        """Submit what was asked; `end` must follow. Raises RequestError, QueueFull, Unavailable."""
        group = f"{next(self._groups)}" if len(ask.requests) > 1 else ""
        ask = replace(ask, requests=tuple(replace(request, client=client, group=group) for request in ask.requests))
        # an answer given whole is gathered in memory anyway; only a stream waits for its reader
        submission = Submission(
            self.engine,
            self.settings.limits.stream_buffer if ask.stream else 1 << 62,
            self._one_post(),
            self.latencies,
        )
        if sum(len(request.prompt) for request in ask.requests) < LONG_PROMPT:
            submission.submit(ask.requests)
        else:
            await self._submit(submission, ask)
        limit_s = self.settings.limits.total_s
        error = Unavailable(f"the request took longer than {limit_s:g} s")
        self._submissions[submission] = asyncio.get_running_loop().call_later(limit_s, submission.abort, error)
        return submission

    async def _submit(self, submission: Submission, ask: Ask) -> None:
        """Checking a long prompt takes milliseconds: off the event loop, where others' tokens go by."""
        submitting = asyncio.ensure_future(self.text(submission.submit, ask.requests, client=ask.requests[0].client))
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:  # the client left, but what has begun can only be ended when it is done

            def end(done: asyncio.Future[None]) -> None:
                if not done.cancelled():
                    done.exception()  # seen: nobody is left to tell
                submission.close()

            submitting.add_done_callback(end)
            raise

    def _one_turns(self) -> tuple[TextTurns, ...]:
        """Of the small bodies, of the large ones and of grammars; new ones if the application was moved to another loop."""
        loop = asyncio.get_running_loop()
        if self._turns is None or self._turns[0] is not loop:
            self._turns = loop, (TextTurns(self.settings.text_threads), TextTurns(1), TextTurns(1))
        return self._turns[1]

    def _one_post(self) -> Post:
        """One for all submissions; a new one if the application was moved to another loop."""
        loop = asyncio.get_running_loop()
        if self._post is None or self._post[0] is not loop:
            self._post = loop, Post(loop)
        return self._post[1]

    def end(self, submission: Submission) -> None:
        """Forget a submission and cancel what still runs of it. Safe to call twice."""
        if timer := self._submissions.pop(submission, None):
            timer.cancel()
            submission.close()

    def abort_all(self, error: PyspecError) -> None:
        """End every submission with `error`; its clients are told."""
        for submission in list(self._submissions):
            submission.abort(error)

    def shut_down(self) -> None:
        """The server ends: so does every submission."""
        self.abort_all(Unavailable("the server is shutting down"))
        self.close()

    def close(self) -> None:
        """Stop the text threads; queued work is dropped."""
        for threads in self._text:
            if threads is not None:
                threads.shutdown(wait=False, cancel_futures=True)
        self._text = [None] * len(self._text)
