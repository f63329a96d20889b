"""Answer objects in the shapes of OpenAI and llama-server, and the parts that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pyspec.errors import PyspecError, Unavailable
from pyspec.request import (
    Delta,
    Done,
    Event,
    Finish,
    Progress,
    PromptLogprobs,
    Started,
    Timings,
    TokenLogprob,
)
from pyspec.server.api.logprobs import LOGPROB_MIN
from pyspec.server.api.prepared import PreparedBody
from pyspec.server.http.envelope import dumps, error_body
from pyspec.text.markup.parts import CallArguments, CallBegin, Content, Part, Reasoning
from pyspec.text.tokenizer import Tokenizer

STOP_TYPE = {"eos": "eos", "stop": "word", "length": "limit"}
FINGERPRINT = "b1-pyspec"
PING = b": ping\n\n"


@dataclass(slots=True)
class Choice:
    """The state of one choice, built from its events."""

    slot: int = -1
    n_prompt: int = 0
    n_cached: int = 0
    n_predicted: int = 0
    has_new_line: bool = False
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # of its tokens except the first
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_ranks: list[int] = field(default_factory=list)
    done: Done | None = None

    def apply(self, event: Event, *, keep: bool) -> None:
        """Apply an event; with `keep`, also collect text, tokens and logprobs for one complete answer."""
        if isinstance(event, Delta):
            self.n_predicted += len(event.tokens)
            self.has_new_line = self.has_new_line or "\n" in event.text
            if keep:
                self.text.append(event.text)
                self.tokens += event.tokens
                self.logprobs += event.logprobs
        elif isinstance(event, Started):
            self.slot, self.n_prompt, self.n_cached = event.slot, event.n_prompt, event.n_cached
        elif isinstance(event, PromptLogprobs):
            self.prompt_logprobs += event.entries
            self.prompt_ranks += event.ranks
        elif isinstance(event, Done):
            self.done = event

    @property
    def ended(self) -> Done:
        """The last event of a choice that has ended."""
        assert self.done is not None
        return self.done


class Answer(ABC):
    """The answer to one body, built from its choices' events: one object at the end, or server-sent events on the way.

    Empty bytes: nothing to send. choices: their state so far
    """

    ping = PING  # keeps a silent stream open

    def __init__(self, prepared: PreparedBody, model: str, tokenizer: Tokenizer) -> None:
        self._prepared, self._model, self._tokenizer = prepared, model, tokenizer
        self.choices = [Choice() for _ in prepared.requests]

    def encode(self, events: Iterable[tuple[int, Event]]) -> bytes:
        """Events of choices that arrive together, as one piece of a stream."""
        return b"".join([self._encode(i, event) for i, event in events])

    def _encode(self, i: int, event: Event) -> bytes:
        self.choices[i].apply(event, keep=False)
        if isinstance(event, Delta):
            return self.delta(i, event)
        if isinstance(event, Done):
            return self.finish(i, event)
        shows_progress = self._prepared.return_progress
        if isinstance(event, Started):
            begun = Progress(event.request, event.n_prompt, event.n_cached, event.n_cached, 0.0)
            return self.opening(i) + (self.progress(i, begun) if shows_progress else b"")
        if shows_progress and isinstance(event, Progress) and event.n_processed > event.n_cached:
            return self.progress(i, event)
        return b""

    @abstractmethod
    def complete(self) -> Any:
        """The answer as one object, after all events."""

    def opening(self, i: int) -> bytes:
        """The request has a slot; no token has been generated yet."""
        return b""

    @abstractmethod
    def delta(self, i: int, event: Delta) -> bytes: ...

    @abstractmethod
    def progress(self, i: int, event: Progress) -> bytes: ...

    @abstractmethod
    def finish(self, i: int, done: Done) -> bytes: ...

    def tail(self) -> bytes:
        """The end of a stream, after all choices."""
        return b""

    def error(self, error: PyspecError) -> bytes:
        """The last event of a stream that failed."""
        return sse(error_body(error))

    def _progress_fields(self, event: Progress) -> dict[str, Any]:
        """llama-server's `prompt_progress`, with its `timings` during the prompt."""
        value: dict[str, Any] = {"prompt_progress": progress_dict(event)}
        if self._prepared.timings_per_token:
            n = event.n_processed - event.n_cached
            read = Timings(cache_n=event.n_cached, prompt_n=n, prompt_ms=event.ms)
            value["timings"] = timings_dict(read)
        return value

    def _native(self, i: int, content: str, tokens: list[int]) -> dict[str, Any]:
        """The last, or only, object of `/completion`. `content` and `tokens` are empty at the end of a stream."""
        choice, prepared = self.choices[i], self._prepared
        done = choice.ended
        return {
            "index": i,
            "content": content,
            "tokens": tokens,
            "id_slot": done.slot if done.slot >= 0 else choice.slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": done.n_predicted,
            "tokens_evaluated": done.n_prompt,
            "generation_settings": prepared.settings_of(i),
            "prompt": prepared.prompt_texts[i],
            "has_new_line": choice.has_new_line,
            "truncated": done.truncated,
            "stop_type": STOP_TYPE.get(ending(done), "none"),
            "stopping_word": done.stop_string,
            "tokens_cached": max(0, done.n_prompt + done.n_predicted - 1),
            **measured(done.timings),
        }


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return f"data: {dumps(value)}\n\n".encode()


def ending(done: Done) -> Finish:
    """An answer's finish reason for clients. If its grammar was complete, as if the model had ended it, because no stop string did."""
    return "eos" if done.finish == "stop" and not done.stop_string else done.finish


def unfinished(done: Done) -> PyspecError | None:
    """The error behind a Done that is no answer. The client did not cancel, so the engine is stopping."""
    if done.finish == "cancelled":
        return Unavailable("the request was cancelled: its engine is ending")
    if done.finish == "error":
        return PyspecError("generation failed; the server's log says why")
    return None


def timings_dict(t: Timings) -> dict[str, Any]:
    """llama-server's `timings`; the counts by draft position only if tokens were drafted. Never null or infinite."""
    n_step = t.predicted_n - 1
    value: dict[str, Any] = {
        "cache_n": t.cache_n,
        "prompt_n": t.prompt_n,
        "prompt_ms": t.prompt_ms,
        "prompt_per_token_ms": t.prompt_ms / t.prompt_n if t.prompt_n else 0.0,
        "prompt_per_second": t.prompt_per_second,
        "predicted_n": t.predicted_n,
        "predicted_ms": t.predicted_ms,
        "predicted_per_token_ms": t.predicted_ms / n_step if n_step > 0 else 0.0,
        "predicted_per_second": t.predicted_per_second,
        "draft_n": t.draft_n,
        "draft_n_accepted": t.draft_n_accepted,
    }
    if t.draft_n:
        value |= {
            "n_draft_used": list(t.n_draft_used),
            "drafted_per_pos": list(t.drafted_per_pos),
            "accepted_per_pos": list(t.accepted_per_pos),
        }
    if t.disk_n:
        value["cache_disk_n"] = t.disk_n
    if t.suffix_n:
        value |= {"suffix_n": t.suffix_n, "suffix_n_accepted": t.suffix_n_accepted}
    if t.synthetic:
        value["synthetic"] = True
    if t.cache_break_at >= 0:
        value["cache_break_at"] = t.cache_break_at
    return value


def speculation_dict(t: Timings) -> dict[str, Any] | None:
    """vLLM's `speculative_decoding` block, or None if nothing was drafted.

    The histogram counts verify steps by their number of accepted draft tokens.
    """
    if not t.draft_n:
        return None
    n_step = t.drafted_per_pos[0] if t.drafted_per_pos else t.n_rounds
    at_least = [n_step, *t.accepted_per_pos, 0]
    value: dict[str, Any] = {
        "mean_acceptance_length": t.mean_len,
        "draft_acceptance_rate": t.draft_n_accepted / t.draft_n,
        "acceptance_histogram": [a - b for a, b in pairwise(at_least)],
        "num_spec_steps": n_step,
        "num_accepted_draft_tokens": t.draft_n_accepted,
        "num_draft_tokens": t.draft_n,
        "num_spec_tokens": len(t.drafted_per_pos),
    }
    if t.synthetic:
        value["synthetic"] = True
    return value


def measured(t: Timings) -> dict[str, Any]:
    """`timings`, and `metrics` if tokens were drafted, of one answer."""
    spec = speculation_dict(t)
    metrics = {"metrics": {"speculative_decoding": spec}} if spec else {}
    return {"timings": timings_dict(t)} | metrics


def usage_dict(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """OpenAI's `usage` over finished choices, `n` per prompt: each prompt is counted once, all its answers are counted."""
    done = [choice.done for choice in choices if choice.done]
    n_prompt = sum(d.n_prompt for d in done[::n])
    n_out = sum(d.n_predicted for d in done)
    details = {"cached_tokens": sum(d.timings.cache_n for d in done[::n])}
    if n_disk := sum(d.timings.disk_n for d in done[::n]):
        details["cached_tokens_from_disk"] = n_disk
    return {
        "completion_tokens": n_out,
        "prompt_tokens": n_prompt,
        "total_tokens": n_prompt + n_out,
        "prompt_tokens_details": details,
    }


def best(choices: Sequence[Choice], n: int, n_run: int) -> list[int]:
    """Indices of the returned choices by prompt: the `n` with the highest mean log probability of their tokens, best first."""
    if n == n_run:
        return list(range(len(choices)))
    shown: list[int] = []
    for first in range(0, len(choices), n_run):
        shown += sorted(range(first, first + n_run), key=lambda i: -mean_logprob(choices[i]))[:n]
    return shown


def mean_logprob(choice: Choice) -> float:
    """Mean log probability of an answer's tokens; 0 for an empty answer."""
    values = [max(entry.logprob, LOGPROB_MIN) for entry in choice.logprobs]
    return sum(values) / len(values) if values else 0.0


def progress_dict(event: Progress) -> dict[str, Any]:
    """llama-server's `prompt_progress`."""
    return {
        "total": event.n_prompt,
        "cache": event.n_cached,
        "processed": event.n_processed,
        "time_ms": event.ms,
    }


def pieces(event: Delta, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """The text of each token of a round, and True if it was drafted: accepted tokens come first, the bonus token last."""
    return [
        (tokenizer.token_bytes(token).decode("utf-8", "replace"), i < event.n_accepted)
        for i, token in enumerate(event.tokens)
    ]


# -- answers of blocks -----------------------------------------------------------------------------------------------
# Answers that consist of blocks: the common parts of Anthropic's messages and OpenAI's responses.
#
# Both put reasoning, text and calls into blocks that begin, grow and end. A block ends when a part of another kind arrives. The same steps
# write the events of a stream and, without sending them, build the complete object.

Sent = dict[str, Any]
"""One event of a stream, with its name as its type."""


def named_event(event: Sent) -> bytes:
    """One server-sent event that has a name."""
    return f"event: {event['type']}\ndata: {dumps(event)}\n\n".encode()


class PartedAnswer(Answer):
    """The answer of one choice. `open` is the kind of the growing block, None between blocks."""

    def __init__(self, prepared: PreparedBody, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(prepared, model, tokenizer)
        self._parser = prepared.markup.parser()
        self._open: type[Part] | None = None
        self._texts: list[str] = []  # of the open block
        self._n_reasoning = 0  # tokens, estimated from the text

    def complete(self) -> Sent:
        text = "".join(self.choices[0].text)
        for _ in self._grow([*self._parser.push(text), *self._parser.finish()]):
            pass
        for _ in self._end_block():
            pass
        return self._final(self.choices[0].ended)

    def delta(self, i: int, event: Delta) -> bytes:
        return self._bytes(self._grow(self._parser.push(event.text)), event)

    def finish(self, i: int, done: Done) -> bytes:
        def events() -> Iterator[Sent]:
            yield from self._grow(self._parser.finish())
            yield from self._end_block()
            yield from self._last_events(done)

        return self._bytes(events())

    def _grow(self, parts: Sequence[Part]) -> Iterator[Sent]:
        """Add parts to the open block, or to new ones."""
        for part in parts:
            if isinstance(part, CallArguments):
                kind: type[Part] = CallBegin
            else:
                kind = type(part)
            if kind is not self._open or isinstance(part, CallBegin):
                yield from self._end_block()
                self._open = kind
                yield from self._begin(part)
            if isinstance(part, Reasoning | Content | CallArguments) and part.text:
                self._texts.append(part.text)
                yield from self._more(part)

    def _end_block(self) -> Iterator[Sent]:
        if self._open is None:
            return
        text, kind = "".join(self._texts), self._open
        self._texts.clear()
        self._open = None
        if kind is Reasoning:
            ids = self._tokenizer.encode(text, add_special=False, parse_special=False)
            self._n_reasoning += len(ids)
        yield from self._end(kind, text)

    def _bytes(self, events: Iterable[Sent], event: Delta | None = None) -> bytes:
        return b"".join(named_event(sent) for sent in events)

    @abstractmethod
    def _begin(self, part: Part) -> Iterator[Sent]:
        """Open a block with its first part `part`."""

    @abstractmethod
    def _more(self, part: Reasoning | Content | CallArguments) -> Iterator[Sent]:
        """Add to the open block."""

    @abstractmethod
    def _end(self, kind: type[Part], text: str) -> Iterator[Sent]:
        """Close the block; `text` is its full text."""

    @abstractmethod
    def _last_events(self, done: Done) -> Iterator[Sent]:
        """The last events of a stream."""

    @abstractmethod
    def _final(self, done: Done) -> Sent:
        """The answer as one object."""
