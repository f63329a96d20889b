"""A deterministic engine on a thread of its own, and a byte-level tokenizer: the server's tests need no model."""

from __future__ import annotations

import codecs
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llguidance import LLMatcher

from pyspec.constrain.grammar import compile_text
from pyspec.constrain.trie import one_line
from pyspec.errors import PromptTooLong, PyspecError, QueueFull, RequestError, Unavailable
from pyspec.request import (
    Delta,
    Done,
    EngineInfo,
    Failed,
    Finish,
    Grammar,
    Metrics,
    Progress,
    PromptLogprobs,
    ReplicaInfo,
    Request,
    SlotInfo,
    Started,
    Timings,
    TokenLogprob,
)
from pyspec.server.engine import Sink
from pyspec.slot_action import SlotAction, SlotAnswer, SlotReport
from pyspec.text.abilities import Abilities
from pyspec.text.marks import spliced
from pyspec.text.vocab import FimMarks

BOS, EOS, N_VOCAB = 256, 257, 258


class ByteTokenizer:
    """Ids 0..255 are bytes; `<s>` and `</s>` are special."""

    n_vocab = N_VOCAB
    add_bos, bos_id = True, BOS
    fim = FimMarks()

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        ids = [BOS] if add_special else []
        while parse_special and (at := text.find("</s>")) >= 0:
            ids += [*text[:at].encode(), EOS]
            text = text[at + 4 :]
        return ids + list(text.encode())

    def encode_parts(self, parts: Sequence[tuple[str, bool] | list[int]]) -> list[int]:
        ids = [BOS]
        for part in parts:
            ids += (
                part
                if isinstance(part, list)
                else self.encode(part[0], add_special=False, parse_special=part[1])
            )
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return b"".join(self.token_bytes(i) for i in ids if special or i < BOS).decode(
            "utf-8", "replace"
        )

    def token_bytes(self, token: int) -> bytes:
        return {BOS: b"<s>", EOS: b"</s>"}.get(token) or (bytes([token]) if token < BOS else b"")


class Template:
    """What renders, before a tokenizer of bytes."""

    add_special = True
    render: Callable[..., str]

    def encode(
        self,
        tokenizer: ByteTokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        begun: str = "",
        rows: Mapping[str, list[int]] | None = None,
        **how: Any,
    ) -> list[int]:
        text = self.render(messages, **how) + begun
        if not self.add_special:
            return tokenizer.encode(text, add_special=False)
        return tokenizer.encode_parts(spliced([(text, True)], rows or {}))


class LineTemplate(Template):
    """`role: content` lines; refuses a role called "bad", as templates refuse unknown roles."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        if any(message["role"] == "bad" for message in messages):
            raise RequestError("the chat template refuses the messages: unexpected role bad")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        lines += [f"tool: {tool['function']['name']}\n" for tool in tools or ()]
        lines += [f"{name}={value}\n" for name, value in (kwargs or {}).items()]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")

    def able(self, *, tools: bool) -> Abilities:
        def render(messages: list[dict[str, Any]], shown: Sequence[Mapping[str, Any]] | None) -> str:
            try:
                return self.render(messages, tools=shown)
            except RequestError:
                return ""

        return Abilities("", render)


@dataclass(frozen=True, kw_only=True)
class Script:
    """The engine's behaviour for the next requests."""

    text: str = "Hello, world"
    width: int = 3  # tokens a round commits
    round_s: float = 0.0
    prefill_s: float = 0.0
    fail_after: int | None = None  # rounds until the request fails
    is_held: bool = False  # its grammar ends the text


@dataclass
class Running:
    id: str
    request: Request
    sink: Sink
    script: Script
    slot: int = -1
    started: float = 0.0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    n_sent: int = 0  # characters released
    n_round: int = 0
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )


class FakeEngine:
    """Answers every request with the script's text. Counts calls, so that tests can check them."""

    def __init__(self, n_slot: int = 4, n_ctx: int = 512, n_queue: int = 8) -> None:
        self.info = EngineInfo(
            model_name="fake-1",
            model_path="fake.gguf",
            arch="fake",
            n_vocab=N_VOCAB,
            n_ctx=n_ctx,
            n_ctx_train=n_ctx,
            n_slot=n_slot,
            n_embd=8,
            n_params=1000,
            n_bytes=4000,
            file_type="F32",
            device="cpu",
            drafter="ngram",
            n_draft_max=8,
            bos_token="<s>",
            eos_token="</s>",
            eog_ids=(EOS,),
        )
        self.tokenizer = ByteTokenizer()
        self.template: LineTemplate | None = LineTemplate()
        self.script = Script()
        self.is_alive = True
        self.seen: list[Request] = []
        self.acted: list[SlotAction] = []
        self.cancelled: dict[str, float] = {}
        self.n_done = 0
        self.n_queue = n_queue
        self._wake = threading.Condition()
        self._queue: deque[Running] = deque()
        self._slots: list[Running | None] = [None] * n_slot
        self._cancel: set[str] = set()
        self._stop = False
        self._thread = threading.Thread(target=self._loop, name="fake-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> str:
        with self._wake:
            if not self.is_alive or self._stop:
                raise Unavailable("the engine is not there")
            if len(request.prompt) >= self.info.n_ctx:
                raise PromptTooLong(len(request.prompt), self.info.n_ctx)
            if not request.prompt:
                raise RequestError("the prompt is empty")
            if len(self._queue) >= self.n_queue:
                raise QueueFull(len(self._queue))
            running = Running(str(len(self.seen)), request, sink, self.script)
            self.seen.append(request)
            self._queue.append(running)
            self._wake.notify()
            return running.id

    def check_grammar(self, grammar: Grammar) -> Grammar:
        """Real grammars are compiled; none of them holds the script to anything."""
        source = compile_text(grammar)
        if flaw := LLMatcher.validate_grammar(source):
            raise RequestError(f"the {grammar.kind} can not be used: {one_line(flaw)}")
        return replace(grammar, kind="compiled", source=source)

    def known_grammar(self, grammar: Grammar) -> Grammar | None:
        return None

    def cancel(self, request_id: str) -> None:
        with self._wake:
            self.cancelled.setdefault(request_id, time.monotonic())
            self._cancel.add(request_id)
            self._wake.notify()

    def slots(self) -> list[SlotInfo]:
        rows = []
        for i, running in enumerate(self._slots):
            row = SlotInfo(
                slot=i, n_ctx=self.info.n_ctx, is_processing=running is not None, speculative=True
            )
            if running:
                row = replace(row, request=running.id, state="decode", params=running.request.params)
            rows.append(row)
        return rows

    def metrics(self) -> Metrics:
        busy = sum(slot is not None for slot in self._slots)
        return Metrics(
            requests_processing=busy,
            requests_queued=len(self._queue),
            requests_done=self.n_done,
            drafts=4,
            draft_tokens=8,
            accepted_tokens=6,
            drafted_per_pos=(4, 4),
            accepted_per_pos=(4, 2),
        )

    def replicas(self, *, counts: bool = True) -> list[ReplicaInfo]:
        return []

    def act_on_slot(self, action: SlotAction, hear: Callable[[SlotAnswer], None]) -> None:
        self.acted.append(action)
        if action.slot >= self.info.n_slot:
            hear(RequestError(f"slot {action.slot} does not exist"))
        else:
            hear(SlotReport(action.slot, 84, 4096 if action.path else 0, 1.5))

    def state(self) -> str:
        return "ok"

    def alive(self) -> bool:
        return self.is_alive

    @property
    def n_busy(self) -> int:
        with self._wake:
            return sum(slot is not None for slot in self._slots) + len(self._queue)

    def close(self) -> None:
        with self._wake:
            self._stop = True
            self._wake.notify()
        self._thread.join(timeout=5)
        for running in (*self._queue, *filter(None, self._slots)):
            running.sink(Failed(running.id, Unavailable("the engine was closed")))
        self._queue.clear()
        self._slots = [None] * len(self._slots)

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._stop or self._queue or any(self._slots)):
                    self._wake.wait()
                if self._stop:
                    return
                self._admit()
                busy = [slot for slot in self._slots if slot]
            for running in busy:
                self._step(running)
            if pause := max((running.script.round_s for running in busy), default=0.0):
                time.sleep(pause)

    def _admit(self) -> None:
        for i, slot in enumerate(self._slots):
            if slot is None and self._queue:
                running = self._queue.popleft()
                running.slot, running.started = i, time.monotonic()
                self._slots[i] = running
                n = len(running.request.prompt)
                running.sink(Started(running.id, i, n, n // 2))

    def _step(self, running: Running) -> None:
        script, request = running.script, running.request
        if running.id in self._cancel:
            self._end(running, "cancelled")
            return
        if time.monotonic() - running.started < script.prefill_s:
            time.sleep(0.002)
            return
        if running.n_round == 0:
            n = len(request.prompt)
            if (n_top := request.prompt_logprobs) is not None:
                told = [
                    TokenLogprob(t, -0.25, ((t, -0.25), (EOS, -2.0))[:n_top]) for t in request.prompt[1:]
                ]
                running.sink(PromptLogprobs(running.id, 1, tuple(told), (1,) * len(told)))
            running.sink(Progress(running.id, n, n // 2, n, 1.5))
        if running.n_round == script.fail_after:
            self._free(running)
            running.sink(Failed(running.id, PyspecError("round failed")))
            return
        running.n_round += 1
        whole = list(script.text.encode()) * (1 if not request.params.ignore_eos else 100)
        limit = self.info.n_ctx - len(request.prompt)
        if request.max_tokens >= 0:
            limit = min(limit, request.max_tokens)
        n_before = len(running.tokens)
        run = whole[n_before : min(n_before + script.width, limit)]
        running.tokens += run
        running.text += running.decoder.decode(bytes(run))
        at = [i for i in (running.text.find(stop) for stop in request.stop) if i >= 0]
        if at:
            running.text = running.text[: min(at)]
        finish: Finish | None = "stop" if at else None
        finish = finish or (
            ("stop" if script.is_held else "eos") if len(running.tokens) == len(whole) else None
        )
        finish = finish or ("length" if len(running.tokens) >= limit else None)
        held = 0 if finish else max((len(stop) - 1 for stop in request.stop), default=0)
        upto = max(running.n_sent, len(running.text) - held)
        released, running.n_sent = running.text[running.n_sent : upto], upto
        running.sink(self._delta(running, run, released))
        if finish:
            self._end(running, finish)

    def _delta(self, running: Running, run: list[int], text: str) -> Delta:
        n = running.request.params.logprobs
        logprobs = ()
        if n is not None:
            own = -0.5 - 0.01 * (max(running.request.params.seed, 0) % 7)
            logprobs = tuple(
                TokenLogprob(t, own, ((t, own), (BOS, float("-inf")))[: max(n, 0)]) for t in run
            )
        return Delta(running.id, tuple(run), text, logprobs, timings=self._timings(running))

    def _timings(self, running: Running) -> Timings:
        n, drafting = len(running.tokens), running.request.n_draft_max != 0
        n_prompt = len(running.request.prompt)
        return Timings(
            cache_n=n_prompt // 2,
            prompt_n=n_prompt - n_prompt // 2,
            prompt_ms=2.0,
            predicted_n=n,
            predicted_ms=4.0,
            n_rounds=running.n_round,
            draft_n=2 * running.n_round if drafting else 0,
            draft_n_accepted=running.n_round if drafting else 0,
            drafted_per_pos=(running.n_round, running.n_round) if drafting else (),
            accepted_per_pos=(running.n_round, 0) if drafting else (),
            n_draft_used=(0, 0, running.n_round) if drafting else (),
        )

    def _free(self, running: Running) -> None:
        with self._wake:
            self._slots[running.slot] = None
            self.n_done += 1

    def _end(self, running: Running, finish: Finish) -> None:
        self._free(running)
        stop = next(
            (s for s in running.request.stop if finish == "stop" and s in running.script.text), ""
        )
        n_prompt, n = len(running.request.prompt), len(running.tokens)
        running.sink(
            Done(running.id, finish, n_prompt, n, self._timings(running), stop, slot=running.slot)
        )
