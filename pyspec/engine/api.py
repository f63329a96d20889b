"""The engine for programs: load, generate, stream, chat; a thread runs the loop behind submit, cancel and events."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path

from pyspec.catalog import paired_kind, resolve
from pyspec.config import EngineSettings, settings_from
from pyspec.engine.incoming import Incoming
from pyspec.engine.job import Job, Sink
from pyspec.engine.load import Loaded, load
from pyspec.errors import (
    BadTemplate,
    ConfigError,
    DeviceError,
    PyspecError,
    QueueFull,
    Unavailable,
)
from pyspec.registry import is_spec_type
from pyspec.request import (
    Delta,
    Done,
    Event,
    Failed,
    Finish,
    Metrics,
    Request,
    SamplingParams,
    SlotInfo,
    Timings,
    TokenLogprob,
)
from pyspec.sample.dry import DryBreakers
from pyspec.sample.sampler import SlotSampler
from pyspec.text.stream import TextStream

log = logging.getLogger(__name__)

Message = Mapping[str, object]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation. `tokens` are those of `text`, without an end-of-generation token."""

    text: str
    tokens: tuple[int, ...]
    finish: Finish
    n_prompt: int
    n_predicted: int
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()
    stop: str = ""
    slot: int = -1


class Engine:
    """A loaded model with its slots. Use as a context manager; safe to call from any thread."""

    def __init__(self, loaded: Loaded) -> None:
        self.loop, self.tokenizer, self.template, self.info = (
            loaded.loop,
            loaded.tokenizer,
            loaded.template,
            replace(loaded.info, n_row=loaded.loop.table.n_row),
        )
        self._incoming = Incoming(self.info, self.tokenizer)
        self._breakers = DryBreakers(self.tokenizer)
        self._ids = itertools.count(1)
        self._wake = threading.Condition()
        self._inbox: list[Job] = []
        self._jobs: dict[str, Job] = {}
        self._due: deque[tuple[Sink, Event]] = deque()
        self._is_urgent = False
        if self.loop.may_defer:
            self.loop.on_wait = self._hand_out
        self._error: PyspecError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="pyspec-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls, target: str | Path, draft: str | Path | None = "auto", *, np: int = 1, ctx: int = 0, **settings: object
    ) -> Engine:
        """Load a GGUF file or a catalogue entry.

        target    path, or a name of `models.toml` ("demo")
        draft     "auto": the entry's drafter, or the MTP block in the file; None: no speculation; a drafter's name; a path
        np, ctx   slots, and tokens one request may hold
        settings  further fields of EngineSettings, e.g. kv_type="f32"
        """
        path, paired = resolve(str(target))
        values: dict[str, object] = {"np": np, "ctx": ctx, **settings}
        if draft is None or is_spec_type(str(draft)):
            values |= {} if draft == "auto" else {"spec_type": str(draft or "none")}
        else:
            values["draft_path"] = Path(draft)
        if paired is not None and values.get("spec_type", "auto") in ("auto", paired_kind(str(target))):
            values.setdefault("draft_path", paired)
        return cls(load(path, settings_from(values)))

    @classmethod
    def from_settings(cls, path: Path, settings: EngineSettings) -> Engine:
        return cls(load(path, settings))

    # -- submit, cancel, events: all that the server uses --------------------------------------------------------

    def submit(self, request: Request, sink: Callable[[Event], None]) -> str:
        """Queue a request. `sink` gets its events on the engine's thread and must not block.

        Raises RequestError if it can never run, QueueFull if too many wait, Unavailable if the engine is down.
        """
        request = self._incoming.check(request)
        job = self._job(request, sink)
        with self._wake:
            if self._error is not None or self._closing:
                raise Unavailable(f"the engine has stopped: {self._error or 'the engine was closed'}")
            waiting = len(self._inbox) + len(self.loop.queue)
            if waiting >= self.loop.queue.limit:
                raise QueueFull(waiting)
            self._jobs[job.id] = job
            self._inbox.append(job)
            self._wake.notify()
        return job.id

    def cancel(self, request_id: str) -> None:
        """End a request at the next round; unknown and finished ids are ignored."""
        with self._wake:
            job = self._jobs.get(request_id)
            if job is not None:
                self.loop.cancel(job)
                self._wake.notify()

    def _job(self, request: Request, sink: Sink) -> Job:
        limit = self._incoming.room
        most = limit if request.max_tokens < 0 else min(limit, len(request.prompt) + request.max_tokens)

        def deliver(event: Event) -> None:
            if isinstance(event, Done | Failed):
                self._jobs.pop(event.request, None)
            self._is_urgent = self._is_urgent or not isinstance(event, Delta)
            self._due.append((sink, event))

        return Job(
            id=f"r{next(self._ids)}",
            request=request,
            sink=deliver,
            stream=TextStream(self.tokenizer, request.stop),
            sampler=SlotSampler(request.params, self.info.n_vocab, self.tokenizer.eog, request.prompt, self._breakers),
            eog=self.tokenizer.eog,
            n_ctx=limit,
            n_rows=most + self.info.n_overhang,
        )

    def _hand_out(self) -> None:
        """Give listeners what rounds said. A listener wakes other threads, and these want the GIL: what is not urgent is
        handed out while the device works on the next round, when nobody else needs it."""
        self._is_urgent = False
        while self._due:
            sink, event = self._due.popleft()
            try:  # a listener is the caller's code, an event loop that was closed, say: its failure ends its own request
                sink(event)
            except Exception:
                log.exception("the listener of request %s failed", event.request)
                if (job := self._jobs.get(event.request)) is not None:
                    job.cancelled = True

    def _run(self) -> None:
        """The engine's thread: one round after another, asleep when there is nothing to do."""
        while True:
            with self._wake:
                while not self._inbox and self.loop.is_idle and not self._closing:
                    self._wake.wait()
                if self._closing:
                    break
                for job in self._inbox:
                    if (finish := job.spent) is not None:
                        job.done(finish, job.resumed_stop)
                    else:
                        self.loop.submit(job)
                self._inbox.clear()
            try:
                self.loop.step()
            except PyspecError as e:
                self._die(e)
                return
            except Exception as e:
                log.exception("the engine stops")
                self._die(
                    DeviceError(f"the engine failed: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")
                )
                return
            if self._is_urgent or not self.loop.may_defer or not self.loop.jobs:
                self._hand_out()
        self._die(Unavailable("the engine was closed"))

    def _die(self, error: PyspecError) -> None:
        with self._wake:
            self._error = error
            lost, self._inbox = self._inbox, []
        for job in lost:
            self.loop.queue.push(job)
        self.loop.abort(error)
        self._hand_out()
        self.loop.on_wait = lambda: None  # else the loop would keep us, and we its memory

    def slots(self) -> list[SlotInfo]:
        """One row per slot, for people and dashboards; a round may pass while it is read."""
        rows = []
        jobs, controller = dict(self.loop.jobs), self.loop.controller
        for slot in self.loop.table.slots:
            job, lane = jobs.get(slot.index), controller.lanes[slot.index]
            base = SlotInfo(
                slot=slot.index,
                n_ctx=self.info.n_ctx,
                is_processing=job is not None,
                n_past=slot.n_past,
                speculative=controller.n_max > 0,
            )
            if job is not None:
                base = replace(
                    base,
                    request=job.id,
                    state="decode" if job.is_decoding else "prefill",
                    n_prompt=job.n_prompt,
                    n_prompt_processed=min(slot.n_past, job.n_prompt),
                    n_cached=job.n_cached,
                    n_decoded=job.n_predicted,
                    n_remain=job.n_left,
                    n_draft=lane.n_draft,
                    draft_reason=lane.reason,
                    acceptance=controller.acceptance(slot.index),
                    draft_n=sum(job.drafted),
                    draft_n_accepted=sum(job.accepted),
                    params=job.request.params,
                )
            rows.append(base)
        return rows

    def metrics(self) -> Metrics:
        table, states = self.loop.table, self.loop.cache.states
        counts = self.loop.stats.snapshot(
            processing=len(self.loop.jobs),
            queued=len(self.loop.queue) + len(self._inbox),
            pages_used=table.n_page_used,
            pages_total=table.n_page,
        )
        on_device, on_host = states.n_bytes
        return replace(
            counts,
            pages_cached=table.n_page_cached,
            states=len(states),
            states_device_bytes=on_device,
            states_host_bytes=on_host,
        )

    def alive(self) -> bool:
        return self._error is None and self._thread.is_alive()

    def close(self) -> None:
        """Stop the thread; running requests fail with Unavailable. Memory is freed with the last reference."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- for programs --------------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Text, token ids or chat messages to token ids."""
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        if prompt and isinstance(prompt[0], Mapping):
            if self.template is None:
                raise BadTemplate("the model file has no chat template; give text instead of messages")
            return tuple(self.template.encode(self.tokenizer, prompt))  # type: ignore[arg-type]
        return tuple(int(t) for t in prompt)  # type: ignore[arg-type]

    def request(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = -1,
        stop: str | Sequence[str] = (),
        n_draft_max: int | None = None,
        params: SamplingParams | None = None,
        **sampling: object,
    ) -> Request:
        """Build a Request; `sampling` are fields of SamplingParams, e.g. temperature=0."""
        known = [f.name for f in fields(SamplingParams)]
        for name in sampling:
            if name not in known:
                near = get_close_matches(name, known, 1)
                raise ConfigError(f"no sampling parameter '{name}'" + (f"; did you mean '{near[0]}'?" if near else ""))
        return Request(
            prompt=self.encode(prompt),
            params=replace(params or SamplingParams(), **sampling),  # type: ignore[arg-type]
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            n_draft_max=n_draft_max,
        )

    def generate(self, prompt: Prompt, **options: object) -> Result:
        """Run one request to its end. Options as in `request`."""
        return self.run(self.request(prompt, **options))  # type: ignore[arg-type]

    def chat(self, messages: Sequence[Message], **options: object) -> Result:
        """`generate` for chat messages [{"role": ..., "content": ...}]."""
        return self.generate(messages, **options)

    def stream(self, prompt: Prompt, **options: object) -> Iterator[Delta | Done]:
        """Yield Delta per round, and Done at the end. Closing the iterator cancels the request."""
        return self.run_stream(self.request(prompt, **options))  # type: ignore[arg-type]

    def run(self, request: Request) -> Result:
        return collect(self.run_stream(request))

    def run_stream(self, request: Request) -> Iterator[Delta | Done]:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        name = self.submit(request, events.put)
        try:
            while True:
                event = events.get()
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Delta | Done):
                    yield event
                if isinstance(event, Done):
                    return
        finally:
            self.cancel(name)

    def generate_many(self, prompts: Sequence[Prompt], **options: object) -> list[Result]:
        """Run several requests side by side; at most np run at once, the others wait here, not in the queue."""
        requests = [self.request(p, **options) for p in prompts]  # type: ignore[arg-type]
        streams: dict[int, Iterator[Delta | Done]] = {}
        results: list[Result | None] = [None] * len(requests)
        n_done = threading.Semaphore(self.info.n_slot)

        def one(i: int) -> None:
            with n_done:
                streams[i] = self.run_stream(requests[i])
                results[i] = collect(streams[i])

        errors: list[BaseException] = []

        def guarded(i: int) -> None:
            try:
                one(i)
            except PyspecError as e:
                errors.append(e)

        threads = [threading.Thread(target=guarded, args=(i,)) for i in range(len(requests))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if errors:
            raise errors[0]
        return [r for r in results if r is not None]

    async def astream(self, prompt: Prompt, **options: object) -> AsyncIterator[Delta | Done]:
        """`stream` for asyncio."""
        request = await asyncio.to_thread(self.request, prompt, **options)  # type: ignore[arg-type]
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        name = self.submit(request, lambda event: loop.call_soon_threadsafe(events.put_nowait, event))
        try:
            while True:
                event = await events.get()
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Delta | Done):
                    yield event
                if isinstance(event, Done):
                    return
        finally:
            self.cancel(name)

    async def agenerate(self, prompt: Prompt, **options: object) -> Result:
        """`generate` for asyncio."""
        return collect([event async for event in self.astream(prompt, **options)])


def collect(events: Iterator[Delta | Done] | Sequence[Delta | Done]) -> Result:
    """Put a request's deltas together."""
    text, tokens, logprobs = [], [], []
    done: Done | None = None
    for event in events:
        if isinstance(event, Delta):
            text.append(event.text)
            tokens += event.tokens
            logprobs += event.logprobs
        else:
            done = event
    assert done is not None, "a request ended without its last event"
    return Result(
        "".join(text),
        tuple(tokens),
        done.finish,
        done.n_prompt,
        done.n_predicted,
        done.timings,
        tuple(logprobs),
        done.stop_string,
        done.slot,
    )
