"""The engine for programs: load, generate, stream, chat. No torch: requests may run in another process."""

from __future__ import annotations

import asyncio
import gc
import queue
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Literal, NoReturn, Unpack, cast, overload
from weakref import WeakKeyDictionary

from pyspec.config import EngineSettings, LoadOptions
from pyspec.engine.arguments import (
    callable_of,
    deadline_of,
    named_of,
    pair_of,
    path_of,
    prompts_of,
    settings_given,
    slot_path,
)
from pyspec.engine.aside import to_loop
from pyspec.engine.block_events import BlockPublisher, publishers_of
from pyspec.engine.chat_tools import AnswerReading, ChatDelta, ChatResult, Chats, ToolOptions, collected
from pyspec.engine.named import Named
from pyspec.engine.option_texts import with_options
from pyspec.engine.options import (
    GenerateOptions,
    GrammarOptions,
    Message,
    Prompt,
    argument_names,
    by_settings,
    check_messages,
    ids_of,
    request_of,
    settings_of,
)
from pyspec.engine.plan.look_apart import look_at_name
from pyspec.engine.protocol import Core
from pyspec.engine.result import (
    Deadline,
    Progress,
    RequestSet,
    Result,
    collect,
    in_time,
    patience,
    submit_when_free,
)
from pyspec.engine.served import ServedEngine
from pyspec.engine.sight import SHOWN, Shown, Sight, Sighted, placed
from pyspec.errors import BadTokenizer, ConfigError, PyspecError, QueueFull, RequestError
from pyspec.ranges import SWITCH, shown
from pyspec.request import Delta, Done, Event, Failed, Request
from pyspec.slot_action import SlotAction, SlotAnswer, SlotReport
from pyspec.slots.images import has_images, is_image
from pyspec.text.template import ChatTemplate, template_defaults
from pyspec.text.tokenizer import Tokenizer


class Engine(ServedEngine):
    """A loaded model with its slots. Use as a context manager; safe to call from any thread."""

    def __new__(cls, *parts: object, **named: object) -> Engine:
        if len(parts) < 3:
            raise TypeError('an engine is loaded: `pyspec.Engine.load("demo")`')
        return super().__new__(cls)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an engine can not be pickled or copied; each process loads its own")

    def __init__(
        self,
        core: Core,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        publishers: Sequence[BlockPublisher] = (),
    ) -> None:
        super().__init__(core, tokenizer, template, publishers)
        self._sight = Sight(self.info)
        # wraps calls that may raise
        self._says: Callable[[], AbstractContextManager[None]] = nullcontext
        self._doors: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @classmethod
    def load(
        cls,
        target: str | Path | None = None,
        draft: str | Path | None = "auto",
        *,
        hf: str = "",
        np: int = 1,
        ctx: int = 0,
        isolated: bool = False,
        **settings: Unpack[LoadOptions],
    ) -> Engine:
        """Load a GGUF file, an entry of the catalogue, or a file of a Hugging Face repository.

        target    path, or a name of `models.toml` ("demo")
        hf        in place of it "user/repo" or "user/repo:Q4_K_M": downloaded if it runs and fits here, with the drafter beside it
        draft     "auto": the entry's drafter, or the MTP block in the file; None: no speculation; a drafter's name; a path
        np, ctx   slots, and tokens one request may hold
        isolated  in a process of its own, which is replaced when it fails; else in this one
        settings  further fields of EngineSettings, e.g. kv_type="f32"; the long names of their flags are taken, too

        Raises ConfigError (an argument), ModelError (a file), PairError, DoesNotFit, DeviceError, DownloadError.
        """
        with argument_names():
            values = by_settings({"np": np, "ctx": ctx, **settings})
            if flaw := SWITCH.flaw(isolated):
                raise ConfigError(f"isolated {flaw}")
            settings_of(values)
            named = named_of(target, hf)
            pair = (None if draft is None else path_of("draft", draft, ConfigError), values)
            taken = look_at_name(named, partial(pair_of, named, *pair), apart=isolated)
            engine = cls.from_settings(*pair_of(taken, *pair), isolated=isolated)
        engine._says = argument_names
        return engine

    @classmethod
    def open(
        cls, target: str, draft: str | None, values: Mapping[str, object], *, isolated: bool = False
    ) -> Engine:
        """`load` for the command line: `values` by the names of EngineSettings, errors that name flags."""
        return cls.from_settings(*pair_of(Named(target), draft, values), isolated=isolated)

    @classmethod
    def from_settings(
        cls,
        path: Path,
        settings: EngineSettings,
        *,
        isolated: bool = False,
        begun: Callable[[Core], None] = lambda core: None,
    ) -> Engine:
        """`load` for a path and settings that exist already. begun: gets an isolated core before it is loaded; to close it ends the load"""
        path, settings = Path(path_of("path", path, ConfigError)), settings_given(settings)
        if settings.replicas > 1 and not isolated:
            raise ConfigError(
                "--replicas wants engines in processes of their own: leave out --in-process (isolated=True in Python)"
            )
        publishers = publishers_of(settings)
        try:
            return cls._loaded(path, settings, isolated, publishers, begun)
        except BaseException:
            for publisher in publishers:
                publisher.close()
            raise

    @classmethod
    def _loaded(
        cls,
        path: Path,
        settings: EngineSettings,
        isolated: bool,
        publishers: Sequence[BlockPublisher],
        begun: Callable[[Core], None],
    ) -> Engine:
        followers = [publisher.publish for publisher in publishers]
        on_blocks = followers[0] if followers else None
        if isolated:
            from pyspec.engine.process.replicas import Replicas
            from pyspec.engine.process.supervisor import Supervisor

            supervisor = (
                Replicas(path, settings, on_blocks=followers)
                if settings.replicas > 1
                else Supervisor(path, settings, on_blocks=on_blocks)
            )
            try:
                begun(supervisor)
                try:  # while the other process loads
                    tokenizer, template = supervisor.tokenizer, supervisor.template
                except BadTokenizer:
                    supervisor.wait()  # it reads the whole file, and may know that it is no model
                    raise
                if template is not None:
                    template.warm()
                supervisor.wait()
            except BaseException:
                supervisor.close()
                raise
            return cls(supervisor, tokenizer, template, publishers)
        # imported by name, because torch comes with it
        load = import_module("pyspec.engine.process.core").EngineCore.load
        core = load(path, settings, on_blocks=on_blocks)
        if settings.warm_up and gc.isenabled():
            gc.collect()  # else the collector looks at all that was loaded in the middle of an answer, which takes 0.1 to 0.2 s
        return cls(core, core.tokenizer, core.template, publishers)

    # -- for programs: they wait for room in the queue -----------------------------------------------------------

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Convert text, token ids or chat messages to the token ids of a generation. Raises RequestError, BadTemplate.

        Rows of images have ids of 2^32 or more: `request` takes the images themselves.
        """
        return self._encode(prompt, None).ids

    def _encode(self, prompt: Prompt, images: object) -> Sighted:
        if isinstance(prompt, Request):
            return Sighted(prompt.prompt, prompt.images)
        if isinstance(prompt, str):
            return self._sight.text(self.tokenizer, prompt, images)
        if isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], str):
            raise RequestError(
                "the prompt is a list of texts; want text, token ids or messages (`generate_many` takes a list of prompts)"
            )
        if isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
            messages, seen = cast(Sequence[Message], prompt), Shown()
            check_messages(messages)
            messages = self._sight.with_marks(messages, images, seen)
            values, rows = (
                template_defaults(self.info.chat_template),
                self._sight.rows(self.tokenizer, seen),
            )
            try:
                ids = self.template.encode(self.tokenizer, messages, kwargs=values, rows=rows)
            except RecursionError:
                raise RequestError("messages are nested more deeply than they can be written") from None
            return placed(ids, seen)
        if images:
            raise RequestError("images go with text or messages; with token ids build a pyspec.Request")
        return Sighted(ids_of(prompt))

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Convert token ids to text; include control tokens if `special`. Each image is "[image]"."""
        ids, n = ids_of(tokens, "tokens"), self.info.n_vocab
        if has_images(ids):
            runs = groupby(ids, is_image)
            return "".join(SHOWN if of else self.decode([*run], special=special) for of, run in runs)
        if ids and not 0 <= min(ids) <= max(ids) < n:
            raise RequestError(
                f"tokens: {shown(next(t for t in ids if not 0 <= t < n))} is outside 0..{n - 1}"
            )
        return self.tokenizer.decode(ids, special=special)

    @with_options
    def request(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Request:
        """Build a Request without running it: `generate`, `stream` and the others take it in place of a prompt.

        prompt   text; token ids; chat messages [{"role": ..., "content": ...}], which the model's chat template renders

        Raises RequestError if it can never run, ConfigError for an unknown option.
        """
        if options.get("timeout") is not None:
            raise ConfigError(
                "timeout belongs to the call that runs the request: `run`, `generate`, `stream`"
            )
        return self._request(prompt, options)

    def _request(self, prompt: Prompt, options: GenerateOptions) -> Request:
        """`request` for a call, which sees to the `timeout` itself."""
        if isinstance(prompt, Request):
            if options.keys() - {"timeout"}:
                raise ConfigError(
                    f"a Request has its options already; {min(options.keys() - {'timeout'})} belongs where it is made"
                )
            return prompt
        given = self._encode(prompt, options.get("images"))
        request = request_of(given.ids, options, self.info.sampling, images=given.images)
        if request.grammar is None:
            return request
        try:
            return replace(request, grammar=self.check_grammar(request.grammar))
        except RequestError as e:
            name = next(name for name in GrammarOptions.__annotations__ if options.get(name) is not None)
            raise RequestError(f"{name}: {e}") from None

    @with_options
    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Result:
        """Run one prompt to its end and return the whole result: `.text`, `.tokens`, `.finish`, `.timings` and more (see pyspec.Result).

        prompt   text; token ids; chat messages; or a Request from `request`

        Waits while the queue is full. Raises RequestError (it can never run), ConfigError (an unknown option), Unavailable (the engine is
        closed or gone), TimedOut (`timeout` is over), and the generation's own error; all are pyspec.PyspecError.
        """
        deadline = deadline_of(options.get("timeout"))
        with self._calling():
            return collect(self._events(self._request(prompt, options), deadline))

    @with_options
    def chat(self, messages: Sequence[Message], **options: Unpack[ToolOptions]) -> ChatResult:
        """Answer a chat and return the whole answer: `.content`, `.reasoning`, `.tool_calls`, and the fields of `generate`'s result.

        messages   [{"role": "user", "content": "Hi"}, ...]; roles are system, user, assistant, tool

        Tools:

            tools: Sequence[Mapping] | None = None
                functions that the model may call, as OpenAI's clients write them:
                {"type": "function", "function": {"name": "add", "description": "...", "parameters": {a JSON Schema}}}
            tool_choice: str | Mapping = "auto"
                "auto": the model decides; "none"; "required": at least one call; the name of a tool that must be called; or OpenAI's object
            parallel_tool_calls: bool = True
                the answer may have more than one call
            tool_call_parser: str = "auto"
                the format of calls, "hermes" for example; "auto": the chat template's format, or, if it has none, the one that the
                prompt then asks for
            response_format: Mapping | None = None
                constrains the content, as OpenAI's clients write it ({"type": "json_object"}, "json_schema"), in place of
                `json_schema`; calls may replace the content

        Prompt, constraints and parsing are the same as for `/v1/chat/completions`. Each of `.tool_calls` has an `id`, a `name` and `arguments`
        (JSON text; `values()` parses it). To continue, append `.message` and {"role": "tool", "tool_call_id": id, "content": the tool's result}
        to the messages.

        `.finish_reason` is "tool_calls" if the answer ends with calls.

        Raises the same errors as `generate`.
        """
        return collected(list(self.chat_stream(messages, **options)))

    def chat_stream(
        self, messages: Sequence[Message], **options: Unpack[ToolOptions]
    ) -> Generator[ChatDelta | Done, None, None]:
        """Stream a `chat`: a ChatDelta for each round, with `.content`, `.reasoning`, and the `.tool_calls` that it completes; then Done, with
        an empty `.content`. Closing the iterator ends the request. Options and errors as in `chat`."""
        deadline = deadline_of(options.get("timeout"))
        with self._calling():
            call = self._chats.call(messages, options)
            reading = AnswerReading(call.markup)
            with closing(self._events(call.request, deadline)) as events:
                for event in events:
                    yield from reading.events(event)

    @property
    def _chats(self) -> Chats:
        return Chats(
            self.tokenizer,
            self.template,
            self.info.chat_template,
            self.check_grammar,
            self.info.sampling,
            self._sight,
        )

    @with_options
    def stream(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> Generator[Delta | Done, None, None]:
        """Stream a `generate`: a pyspec.Delta for each round, with `.text` and `.tokens`, then pyspec.Done, with an empty `.text`.

            for delta in engine.stream("Once upon a time", max_tokens=40):
                print(delta.text, end="", flush=True)

        prompt   text; token ids; chat messages; or a Request from `request`

        Closing the iterator, or leaving the loop, ends the request. Raises the same errors as `generate`.
        """
        deadline = deadline_of(options.get("timeout"))
        return self._stream(self._request(prompt, options), deadline)

    def run(self, request: Request, timeout: float | None = None) -> Result:
        """Run a request to its end, for `timeout` seconds at most. Raises the request's error, TimedOut."""
        return collect(self.run_stream(request, timeout))

    def run_stream(
        self, request: Request, timeout: float | None = None
    ) -> Generator[Delta | Done, None, None]:
        """Yield Delta per round, and Done at the end. Closing the iterator cancels the request. Raises as `run`."""
        return self._stream(request, deadline_of(timeout))

    def _stream(self, request: Request, deadline: Deadline) -> Generator[Delta | Done, None, None]:
        with self._calling(), closing(self._events(request, deadline)) as events:
            yield from events

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Around a call that waits for requests: one that began before a drain may submit them. Raises Unavailable."""
        with self._counting:
            self._refuse_new()
            self._n_call += 1
        try:
            yield
        finally:
            with self._counting:
                self._n_call -= 1

    def _events(self, request: Request, deadline: Deadline) -> Generator[Delta | Done, None, None]:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        name = submit_when_free(self._submit, request, events.put, deadline)
        event, n_token = None, 0
        try:
            while True:
                try:
                    event = events.get(timeout=deadline.left())
                except queue.Empty:
                    raise deadline.error(event, n_token) from None
                n_token += len(event.tokens) if isinstance(event, Delta) else 0
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Delta | Done):
                    yield event
                if isinstance(event, Done):
                    return
        finally:
            self.cancel(name)

    @overload
    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        progress: Progress | None = None,
        return_exceptions: Literal[False] = False,
        **options: Unpack[GenerateOptions],
    ) -> list[Result]: ...

    @overload
    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        progress: Progress | None = None,
        return_exceptions: bool,
        **options: Unpack[GenerateOptions],
    ) -> list[Result | PyspecError]: ...

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        progress: Progress | None = None,
        return_exceptions: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> list[Result] | list[Result | PyspecError]:
        """Run several prompts side by side with the same options. Results are in the order of the prompts.

        At most np run at once; the others wait here, not in the queue. Options are those of `generate`; `timeout` is that of the whole call.

        prompts            a list of prompts as for `generate`
        progress           called with (ended, all) after each end
        return_exceptions  put a failed prompt's error in its place; else raise it, and end the others
        """
        requests: list[Request | PyspecError] = []
        on_end = None if progress is None else callable_of("progress", progress)
        deadline = deadline_of(options.get("timeout"))
        with self._calling():
            for prompt in prompts_of(prompts):
                try:
                    requests.append(self._request(prompt, options))
                except PyspecError as e:
                    if not return_exceptions:
                        raise
                    requests.append(e)
            several = RequestSet(requests, on_end, return_exceptions, deadline)
            return several.run(self._submit, self.cancel, self.info.n_slot)

    def _submit(self, request: Request, sink: Callable[[Event], None]) -> str:
        """`submit` for a caller that waits for `sink`'s events."""
        self._refuse_listener()
        with self._says():
            return self._send(request, sink)

    def _refuse_listener(self) -> None:
        """Refuse a call from a listener: on the engine's thread it would wait for itself."""
        if self.core.in_listener():
            raise RequestError(
                "a listener can not wait for its own engine, which waits for the listener: use `submit` there, or another thread"
            )

    def save_slot(self, slot: int, path: str | Path) -> SlotReport:
        """Write the text that the slot's last request left to a file: tokens, keys and values, states, the drafter's. Waits while the slot is busy.

        A request that begins with those tokens continues from them. Raises RequestError, or PyspecError if the file can not be written.
        """
        return self._act(SlotAction("save", slot, slot_path(path)))

    def restore_slot(self, slot: int, path: str | Path) -> SlotReport:
        """Restore a file of `save_slot` into any slot, for the same model and drafter. Raises BadSlotFile, RequestError."""
        return self._act(SlotAction("restore", slot, slot_path(path)))

    def erase_slot(self, slot: int) -> SlotReport:
        """Forget the content that requests in this slot have left."""
        return self._act(SlotAction("erase", slot))

    def _act(self, action: SlotAction) -> SlotReport:
        self._refuse_listener()
        heard: queue.SimpleQueue[SlotAnswer] = queue.SimpleQueue()
        with self._says():
            self.act_on_slot(action, heard.put)
        answer = heard.get()
        if isinstance(answer, PyspecError):
            raise answer
        return answer

    async def astream(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Delta | Done, None]:
        """`stream` for asyncio: `async for delta in engine.astream("Once upon a time", max_tokens=40)`. Options and errors as in `stream`."""
        deadline = deadline_of(options.get("timeout"))
        with self._calling():
            request = await in_time(deadline, self._request, prompt, options)
            async with aclosing(self._aevents(request, deadline)) as events:
                async for event in events:
                    yield event

    async def _aevents(self, request: Request, deadline: Deadline) -> AsyncGenerator[Delta | Done, None]:
        events: asyncio.Queue[Event] = asyncio.Queue()
        sink = to_loop(asyncio.get_running_loop(), events, self.core.cancel)
        event, n_token, name = None, 0, ""
        try:
            async with asyncio.timeout(deadline.left()):
                name = await self._asubmit(request, sink)
            while True:
                async with asyncio.timeout(deadline.left()):
                    event = await events.get()
                n_token += len(event.tokens) if isinstance(event, Delta) else 0
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Delta | Done):
                    yield event
                if isinstance(event, Done):
                    return
        except TimeoutError as e:
            raise (e if isinstance(e, PyspecError) else deadline.error(event, n_token)) from None
        finally:
            self.cancel(name)

    async def _asubmit(self, request: Request, sink: Callable[[Event], None]) -> str:
        """Submit, after earlier calls of this event loop that wait for room in the queue."""
        async with self._doors.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            for seconds in patience():
                try:
                    return self._submit(request, sink)
                except QueueFull:
                    await asyncio.sleep(seconds)
        raise AssertionError("patience ends")

    async def agenerate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Result:
        """`generate` for asyncio: a task that is cancelled ends its request. Options and errors as in `generate`."""
        return collect([event async for event in self.astream(prompt, **options)])

    async def achat(self, messages: Sequence[Message], **options: Unpack[ToolOptions]) -> ChatResult:
        """`chat` for asyncio: a task that is cancelled ends its request. Options and errors as in `chat`."""
        return collected([event async for event in self.achat_stream(messages, **options)])

    async def achat_stream(
        self, messages: Sequence[Message], **options: Unpack[ToolOptions]
    ) -> AsyncGenerator[ChatDelta | Done, None]:
        """`chat_stream` for asyncio. Options and errors as in `chat`."""
        deadline = deadline_of(options.get("timeout"))
        with self._calling():
            call = await in_time(deadline, self._chats.call, messages, options)
            reading = AnswerReading(call.markup)
            async with aclosing(self._aevents(call.request, deadline)) as events:
                async for event in events:
                    for read in reading.events(event):
                        yield read
