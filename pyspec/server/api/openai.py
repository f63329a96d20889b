"""Common parts of OpenAI's answer formats, and completions; complete and streamed, with llama-server's `timings`.

A stream's constant parts are encoded once; a chunk costs one json.dumps of its text.
"""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspec.errors import PyspecError
from pyspec.request import Delta, Done, Progress, TokenLogprob, finish_reason
from pyspec.server.api.answers import (
    FINGERPRINT,
    Answer,
    Choice,
    best,
    measured,
    pieces,
    timings_dict,
    usage_dict,
)
from pyspec.server.api.logprobs import logprob_list, prompt_logprobs, prompt_rows, text_logprobs
from pyspec.server.api.prepared import PreparedBody
from pyspec.server.http.envelope import dumps
from pyspec.text.markup.parts import AnswerParser, CallArguments, CallBegin, Content, Part, Reasoning
from pyspec.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


@dataclass
class Held:
    """What a stream tells of tokens without text: it waits for their choice's next chunk."""

    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    pieces: list[tuple[str, bool]] = field(default_factory=list)


class OpenAIAnswer(Answer):
    """Common parts of the chat and the text format: head, usage, held-back logprobs, end of a stream."""

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(self, prepared: PreparedBody, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(prepared, model, tokenizer)
        self._head = {
            "id": f"{self.prefix}{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._open = dumps(self._head | {"object": self.chunk_object})[:-1]
        self._held = [Held() for _ in prepared.requests]

    def complete(self) -> dict[str, Any]:
        prepared, choices = self._prepared, self.choices
        shown = [self._shown(at, i) for at, i in enumerate(best(choices, prepared.n, prepared.n_run))]
        value = self._head | {
            "object": self.whole_object,
            "choices": shown,
            "usage": usage_dict(choices, prepared.n_run),
        }
        return value | measured(choices[0].ended.timings) | self._verbose()

    def _shown(self, at: int, i: int) -> dict[str, Any]:
        """Choice i as the answer's number `at`. Several have figures of their own; the answer's are the first one's, as in llama-server."""
        choice, value = self.choices[i], self._choice(at, i)
        if self._prepared.return_tokens:
            value["tokens"] = choice.tokens
        return value | measured(choice.ended.timings) if len(self.choices) > 1 else value

    def _verbose(self) -> dict[str, Any]:
        """llama-server's `__verbose`: the first choice as `/completion` would return it."""
        first = self.choices[0]
        if not self._prepared.verbose:
            return {}
        return {"__verbose": self._native(0, "".join(first.text), first.tokens)}

    def tail(self) -> bytes:
        if not self._prepared.include_usage:
            return DONE
        usage = usage_dict(self.choices, self._prepared.n_run)
        extra = {"choices": [], "usage": usage} | measured(self.choices[0].ended.timings)
        return self._chunk(dumps(extra)[1:-1]) + DONE

    def error(self, error: PyspecError) -> bytes:
        return super().error(error) + DONE

    def delta(self, i: int, event: Delta) -> bytes:
        """A chunk with the released text; values of tokens without text wait for the next chunk."""
        held = self._held[i]
        if self._prepared.logprobs:
            held.logprobs += event.logprobs
        if self._prepared.return_tokens:
            held.tokens += event.tokens
        tail = ""
        if self._prepared.timings_per_token and event.timings:
            tail = f',"timings":{dumps(timings_dict(event.timings))}'
        if self._prepared.return_pieces:
            held.pieces += pieces(event, self._tokenizer)
        written = list(self._deltas(i, event.text))
        first = self._take_pieces(i) if written else ""
        return b"".join(
            self._chunk(f'"choices":[{delta}]{tail}{"" if n else first}')
            for n, delta in enumerate(written)
        )

    def _take_pieces(self, i: int) -> str:
        """Waiting tokens of choice i as a field of its next chunk."""
        taken, self._held[i].pieces = self._held[i].pieces, []
        return f',"pieces":{dumps(taken)}' if taken else ""

    def finish(self, i: int, done: Done) -> bytes:
        reason = {"finish_reason": self._finish_reason(i, done)}
        value = self._end_choice(i) | reason | self._take_pending(i)
        extra: dict[str, Any] = {"choices": [value]}
        if not self._prepared.include_usage:  # else the usage chunk has them
            extra |= measured(done.timings) | self._last_usage(self.choices[i])
        if i == 0:
            extra |= self._verbose()
        return self._chunk(dumps(extra)[1:-1] + self._take_pieces(i))

    def _last_usage(self, choice: Choice) -> dict[str, Any]:
        """`usage` of a choice's last chunk if the client did not request a usage chunk."""
        return {}

    def progress(self, i: int, event: Progress) -> bytes:
        choice = self._end_choice(i) | {"finish_reason": None}
        return self._chunk(dumps({"choices": [choice]} | self._progress_fields(event))[1:-1])

    def _chunk(self, inner: str) -> bytes:
        return f"data: {self._open},{inner}}}\n\n".encode()

    def _take_pending(self, i: int) -> dict[str, Any]:
        """Logprobs and tokens that wait for the next chunk of choice i."""
        value: dict[str, Any] = {}
        held = self._held[i]
        if held.logprobs:
            value["logprobs"] = self._logprobs(i, held.logprobs)
            held.logprobs = []
        if held.tokens:
            value["tokens"] = held.tokens
            held.tokens = []
        return value

    def _prompt_logprobs(self, choice: Choice, n: int) -> list[Any]:
        """vLLM's list of a prompt's tokens: null for the first one."""
        rows = prompt_logprobs(choice.prompt_logprobs, choice.prompt_ranks, self._tokenizer, n)
        return [None, *rows] if choice.n_prompt else rows

    def _finish_reason(self, i: int, done: Done) -> str:
        return finish_reason(done.finish)

    @abstractmethod
    def _choice(self, at: int, i: int) -> dict[str, Any]:
        """Choice i as the answer's number `at`."""

    @abstractmethod
    def _deltas(self, i: int, text: str) -> Iterator[str]:
        """A chunk's choice for each piece of the added text."""

    @abstractmethod
    def _end_choice(self, i: int) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, i: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]: ...


class TextAnswer(OpenAIAnswer):
    """`/v1/completions`."""

    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, prepared: PreparedBody, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(prepared, model, tokenizer)
        self._offset = [0 for _ in prepared.requests]

    def opening(self, i: int) -> bytes:
        if not self._prepared.echo:
            return b""
        return b"".join(
            self._chunk(f'"choices":[{delta}]')
            for delta in self._deltas(i, self._prepared.prompt_texts[i])
        )

    def _last_usage(self, choice: Choice) -> dict[str, Any]:
        """llama-server sends usage with every stream of this path. With several choices, no single chunk covers all of them."""
        return {"usage": usage_dict([choice], 1)} if len(self.choices) == 1 else {}

    def _choice(self, at: int, i: int) -> dict[str, Any]:
        prepared, choice = self._prepared, self.choices[i]
        first = i // prepared.n_run * prepared.n_run  # of its prompt, whose log probabilities it has
        n, prompt = prepared.requests[first].prompt_logprobs, prepared.requests[first].prompt
        read = self.choices[first]
        value: dict[str, Any] = {
            "index": at,
            "text": "".join(choice.text),
            "logprobs": self._logprobs(at, choice.logprobs) if prepared.logprobs else None,
            "finish_reason": finish_reason(choice.ended.finish),
        }
        if prepared.echo:
            value["text"] = prepared.prompt_texts[i] + value["text"]
        if prepared.echo and prepared.logprobs and n is not None and prompt:
            n_top = prepared.requests[i].params.logprobs or 0
            rows = prompt_rows(prompt, read.prompt_logprobs, self._tokenizer, n_top)
            value["logprobs"] = text_logprobs([*rows, *value["logprobs"]["content"]])
        if prepared.tells_prompt:
            value["prompt_logprobs"] = self._prompt_logprobs(read, n or 0)
        return value

    def _deltas(self, i: int, text: str) -> Iterator[str]:
        if text:
            held = self._take_pending(i)
            more = f",{dumps(held)[1:-1]}" if held else ""
            yield f'{{"index":{i},"finish_reason":null,"text":{dumps(text)}{more}}}'

    def _end_choice(self, i: int) -> dict[str, Any]:
        return {"index": i, "text": ""}

    def _logprobs(self, i: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        value = text_logprobs(logprob_list(entries, self._tokenizer), self._offset[i])
        self._offset[i] += sum(len(token) for token in value["tokens"])
        return value


# -- chats -----------------------------------------------------------------------------------------------------------
# Answers of chat completions: content, reasoning and calls from the answer's parser.


@dataclass
class MessageParts:
    """The parser of one choice, and its collected parts.

    is_begun    its role was sent
    has_called  a call was sent, or is in the message
    """

    parser: AnswerParser
    is_begun: bool = False
    has_called: bool = False
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)

    def keep(self, parts: Iterable[Part]) -> None:
        """Collect parts for one complete answer."""
        for part in parts:
            if isinstance(part, Content):
                self.content.append(part.text)
            elif isinstance(part, Reasoning):
                self.reasoning.append(part.text)
            elif isinstance(part, CallBegin):
                function = {"name": part.name, "arguments": ""}
                self.has_called = True
                self.calls.append({"id": part.id, "type": "function", "function": function})
                self.arguments.append([])
            else:
                self.arguments[part.index].append(part.text)

    def message(self) -> dict[str, Any]:
        for call, arguments in zip(self.calls, self.arguments, strict=True):
            call["function"]["arguments"] = "".join(arguments)
        text = "".join(self.content)
        content = text if text or not self.calls else None
        value: dict[str, Any] = {"role": "assistant", "content": content}
        if self.reasoning:
            value["reasoning_content"] = "".join(self.reasoning)
        return value | ({"tool_calls": self.calls} if self.calls else {})


class ChatAnswer(OpenAIAnswer):
    """`/v1/chat/completions`. A choice's first chunk has its role only."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, prepared: PreparedBody, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(prepared, model, tokenizer)
        self._parts = [MessageParts(prepared.markup.parser()) for _ in prepared.requests]

    def complete(self) -> dict[str, Any]:
        value, n = super().complete(), self._prepared.requests[0].prompt_logprobs
        if self._prepared.tells_prompt and n is not None:
            value["prompt_logprobs"] = self._prompt_logprobs(self.choices[0], n)
        return value

    def delta(self, i: int, event: Delta) -> bytes:
        return self._role(i) + super().delta(i, event)

    def progress(self, i: int, event: Progress) -> bytes:
        return self._role(i) + super().progress(i, event)

    def finish(self, i: int, done: Done) -> bytes:
        rest = self._parts[i].parser.finish()
        last = [self._chunk(f'"choices":[{delta}]') for delta in self._written(i, rest)]
        return self._role(i) + b"".join(last) + super().finish(i, done)

    def _role(self, i: int) -> bytes:
        if self._parts[i].is_begun:
            return b""
        self._parts[i].is_begun = True
        first = {"index": i, "finish_reason": None, "delta": {"role": "assistant", "content": None}}
        return self._chunk(f'"choices":[{dumps(first)}]')

    def _choice(self, at: int, i: int) -> dict[str, Any]:
        choice, heard = self.choices[i], self._parts[i]
        heard.keep(heard.parser.push("".join(choice.text)))
        heard.keep(heard.parser.finish())
        value: dict[str, Any] = {
            "index": at,
            "message": heard.message(),
            "finish_reason": self._finish_reason(i, choice.ended),
        }
        if self._prepared.calls_functions and heard.calls:
            value["message"]["function_call"] = value["message"].pop("tool_calls")[0]["function"]
        if self._prepared.logprobs:
            value["logprobs"] = self._logprobs(i, choice.logprobs)
        return value

    def _finish_reason(self, i: int, done: Done) -> str:
        reason = finish_reason(done.finish, has_called=self._parts[i].has_called)
        return "function_call" if self._prepared.calls_functions and reason == "tool_calls" else reason

    def _deltas(self, i: int, text: str) -> Iterator[str]:
        if text:
            yield from self._written(i, self._parts[i].parser.push(text))

    def _written(self, i: int, parts: Iterable[Part]) -> Iterator[str]:
        for part in parts:
            held = self._take_pending(i)
            more = f",{dumps(held)[1:-1]}" if held else ""
            yield f'{{"index":{i},"finish_reason":null,"delta":{self._delta(i, part)}{more}}}'

    def _delta(self, i: int, part: Part) -> str:
        if isinstance(part, Content):
            return f'{{"content":{dumps(part.text)}}}'
        if isinstance(part, Reasoning):
            return f'{{"reasoning_content":{dumps(part.text)}}}'
        if isinstance(part, CallArguments):
            call: dict[str, Any] = {"index": part.index, "function": {"arguments": part.text}}
        else:
            self._parts[i].has_called = True
            function = {"name": part.name, "arguments": ""}
            call = {"index": part.index, "id": part.id, "type": "function", "function": function}
        if self._prepared.calls_functions:  # which takes one call
            return dumps({} if part.index else {"function_call": call["function"]})
        return dumps({"tool_calls": [call]})

    def _end_choice(self, i: int) -> dict[str, Any]:
        return {"index": i, "delta": {}}

    def _logprobs(self, i: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"content": logprob_list(entries, self._tokenizer)}
