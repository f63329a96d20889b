"""The engine for programs: load, generate, stream, chat. No torch: what runs the requests may be in another process."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from pyspec.catalog import paired_kind, resolve
from pyspec.config import EngineSettings, settings_from
from pyspec.engine.incoming import Incoming
from pyspec.errors import BadTemplate, ConfigError, QueueFull
from pyspec.registry import is_spec_type
from pyspec.request import (
    Delta,
    Done,
    EngineInfo,
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
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer

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


class Core(Protocol):
    """What runs requests: core.EngineCore in this process, client.Supervisor with one in a process of its own."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: Request, sink: Callable[[Event], None]) -> str:
        """Queue a request that has been checked; `sink` gets its events. Returns its name."""
        ...

    def cancel(self, name: str) -> None:
        """End a request at the next round; a name that is not known is ignored."""
        ...

    def slots(self) -> list[SlotInfo]:
        """What each slot is at."""
        ...

    def metrics(self) -> Metrics:
        """Counters since the start, and gauges."""
        ...

    def alive(self) -> bool:
        """Whether requests are taken."""
        ...

    def state(self) -> str:
        """ "loading", "ok", "recovering" or "stopped"."""
        ...

    def close(self, limit_s: float = ...) -> bool:
        """Stop; running requests fail with Unavailable. False: something would not end within `limit_s`."""
        ...


class Engine:
    """A loaded model with its slots. Use as a context manager; safe to call from any thread."""

    def __init__(self, core: Core, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.core, self.tokenizer, self.template = core, tokenizer, template
        self.info = core.info
        self._incoming = Incoming(self.info, tokenizer)

    @classmethod
    def load(
        cls,
        target: str | Path,
        draft: str | Path | None = "auto",
        *,
        np: int = 1,
        ctx: int = 0,
        isolated: bool = False,
        **settings: object,
    ) -> Engine:
        """Load a GGUF file or a catalogue entry.

        target    path, or a name of `models.toml` ("demo")
        draft     "auto": the entry's drafter, or the MTP block in the file; None: no speculation; a drafter's name; a path
        np, ctx   slots, and tokens one request may hold
        isolated  in a process of its own, which is replaced when it fails; else in this one
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
        return cls.from_settings(path, settings_from(values), isolated=isolated)

    @classmethod
    def from_settings(cls, path: Path, settings: EngineSettings, *, isolated: bool = False) -> Engine:
        """`load` for a path and settings that have been made already."""
        if isolated:
            from pyspec.engine.client import Supervisor

            supervisor = Supervisor(path, settings)
            try:
                tokenizer, template = supervisor.tokenizer, supervisor.template  # while the other process loads
                supervisor.wait()
            except BaseException:
                supervisor.close()
                raise
            return cls(supervisor, tokenizer, template)
        core = import_module("pyspec.engine.core").EngineCore.load(path, settings)  # by name: torch comes with it
        return cls(core, core.tokenizer, core.template)

    # -- submit, cancel, events: all that the server uses --------------------------------------------------------

    def submit(self, request: Request, sink: Callable[[Event], None]) -> str:
        """Queue a request. `sink` gets its events on the engine's thread and must not block.

        Raises RequestError if it can never run, QueueFull if too many wait, Unavailable if the engine is down.
        """
        return self.core.submit(self._incoming.check(request), sink)

    def cancel(self, request_id: str) -> None:
        """End a request at the next round; unknown and finished ids are ignored."""
        self.core.cancel(request_id)

    def slots(self) -> list[SlotInfo]:
        """One row per slot, for people and dashboards."""
        return self.core.slots()

    def metrics(self) -> Metrics:
        """Counters since the start, and gauges."""
        return self.core.metrics()

    def alive(self) -> bool:
        """Whether requests are taken; they are while an isolated engine is replaced, and run when it is back."""
        return self.core.alive()

    def state(self) -> str:
        """ "ok", "recovering" while an isolated engine is replaced, or "stopped"."""
        return self.core.state()

    @property
    def loop(self) -> Any:
        """The loop itself, for tests and measurements. Only an engine of this process has one to show."""
        return self.core.loop  # type: ignore[attr-defined]

    def close(self, limit_s: float | None = None) -> bool:
        """Stop; running requests fail with Unavailable. Memory is freed with the last reference.

        False: what runs on the device does not end, and was left behind after `limit_s` (30 s if not said).
        """
        return self.core.close() if limit_s is None else self.core.close(limit_s)

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
        """Run a request to its end. Raises what it fails with."""
        return collect(self.run_stream(request))

    def run_stream(self, request: Request) -> Iterator[Delta | Done]:
        """Yield Delta per round, and Done at the end. Closing the iterator cancels the request."""
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
        """Run several requests side by side; at most np run at once, the others wait here, not in the queue.

        The first one that fails ends the others, and its error is raised.
        """
        todo = deque(enumerate([self.request(p, **options) for p in prompts]))  # type: ignore[arg-type]
        events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        heard: list[list[Delta | Done]] = [[] for _ in todo]
        names: dict[int, str] = {}
        try:
            while todo or names:
                while todo and len(names) < self.info.n_slot:
                    i, request = todo[0]
                    try:
                        names[i] = self.submit(request, partial(_put, events, i))
                    except QueueFull:
                        if not names:
                            raise
                        break  # others fill the queue: one of ours ends first
                    todo.popleft()
                i, event = events.get()
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Delta | Done):
                    heard[i].append(event)
                if isinstance(event, Done):
                    del names[i]
        finally:
            for name in names.values():
                self.cancel(name)
        return [collect(own) for own in heard]

    async def astream(self, prompt: Prompt, **options: object) -> AsyncIterator[Delta | Done]:
        """`stream` for asyncio."""
        request = await asyncio.to_thread(self.request, prompt, **options)  # type: ignore[arg-type]
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def hear(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        name = self.submit(request, hear)
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


def _put(events: queue.SimpleQueue[tuple[int, Event]], i: int, event: Event) -> None:
    events.put((i, event))


def collect(events: Iterator[Delta | Done] | Sequence[Delta | Done]) -> Result:
    """Put a request's deltas together."""
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
