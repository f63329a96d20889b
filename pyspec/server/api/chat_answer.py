"""Answers of chat completions: content, reasoning and calls from the answer's parser."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspec.request import Delta, Done, Progress, TokenLogprob, finish_reason
from pyspec.server.api.logprobs import logprob_list
from pyspec.server.api.openai import OpenAIAnswer
from pyspec.server.api.prepared import PreparedBody
from pyspec.server.http.envelope import dumps
from pyspec.text.markup.parts import AnswerParser, CallArguments, CallBegin, Content, Part, Reasoning
from pyspec.text.tokenizer import Tokenizer


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
        for call, pieces in zip(self.calls, self.arguments, strict=True):
            call["function"]["arguments"] = "".join(pieces)
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
