"""What all endpoints share: the engine, the settings, the text threads and the submissions that run now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from pyspec.errors import PyspecError, QueueFull, Unavailable
from pyspec.server.api.ask import Ask
from pyspec.server.bridge import Post, Submission
from pyspec.server.engine import EngineLike
from pyspec.server.resume import StreamSessions
from pyspec.server.settings import ServerSettings

T = TypeVar("T")
LONG_PROMPT = 8192  # tokens


class Service:
    """One engine being served. Lives on the event loop; only `text` work leaves it."""

    def __init__(self, engine: EngineLike, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.names = tuple(dict.fromkeys((*settings.aliases, engine.info.model_name)))
        self.model = self.names[0]
        self.sessions = StreamSessions(settings)
        self.started = time.time()
        self.is_draining = False
        self._submissions: dict[Submission, asyncio.TimerHandle] = {}
        self.n_inside = 0
        self._text: ThreadPoolExecutor | None = None
        self._post: tuple[asyncio.AbstractEventLoop, Post] | None = None

    @property
    def n_jobs(self) -> int:
        """Generation requests whose submissions have not been closed."""
        return len(self._submissions)

    async def text(self, work: Callable[..., T], *args: Any) -> T:
        """Run tokenising or rendering off the event loop. The threads start with the first call: a mounted
        application never hears of start-up."""
        if self._text is None:
            self._text = ThreadPoolExecutor(self.settings.text_threads, thread_name_prefix="pyspec-text")
        return await asyncio.get_running_loop().run_in_executor(self._text, work, *args)

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
    def admitted(self) -> Iterator[None]:
        """Count a request from its first byte on, so that a flood is refused before it is parsed.

        The engine bounds its own queue; this bounds what waits to be tokenised for it.
        """
        limit = 8 * self.engine.info.n_slot + 32
        if self.n_inside >= limit:
            raise QueueFull(self.n_inside)
        self.n_inside += 1
        try:
            yield
        finally:
            self.n_inside -= 1

    async def start(self, ask: Ask) -> Submission:
        """Submit what was asked; `end` must follow. Raises RequestError, QueueFull, Unavailable."""
        # an answer given whole is gathered in memory anyway; only a stream waits for its reader
        submission = Submission(
            self.engine, self.settings.limits.stream_buffer if ask.stream else 1 << 62, self._one_post()
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
        submitting = asyncio.ensure_future(self.text(submission.submit, ask.requests))
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:  # the client left, but what has begun can only be ended when it is done

            def end(done: asyncio.Future[None]) -> None:
                if not done.cancelled():
                    done.exception()  # seen: nobody is left to tell
                submission.close()

            submitting.add_done_callback(end)
            raise

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
        if self._text is not None:
            self._text.shutdown(wait=False, cancel_futures=True)
            self._text = None
