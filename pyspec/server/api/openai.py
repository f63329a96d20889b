"""Common parts of OpenAI's answer formats, and completions; complete and streamed, with llama-server's `timings`.

A stream's constant parts are encoded once; a chunk costs one json.dumps of its text.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from pyspec.errors import PyspecError
from pyspec.request import Delta, Done, Progress, TokenLogprob, finish_reason
from pyspec.server.api.answers import (
    FINGERPRINT,
    PING,
    Choice,
    measured,
    native_final,
    pieces,
    progress_dict,
    progress_timings,
    sse,
    text_logprobs,
    timings_dict,
    usage_dict,
)
from pyspec.server.api.choices import best, prompt_logprobs, with_prompt
from pyspec.server.api.prepared import PreparedBody
from pyspec.server.http.envelope import dumps, error_body
from pyspec.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


class OpenAIAnswer(ABC):
    """Common parts of the chat and the text format: head, usage, held-back logprobs, end of a stream."""

    ping = PING
    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(self, prepared: PreparedBody, model: str, tokenizer: Tokenizer) -> None:
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._head = {
            "id": f"{self.prefix}{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._open = dumps(self._head | {"object": self.chunk_object})[:-1]
        self._held: dict[int, list[TokenLogprob]] = {i: [] for i in range(len(prepared.requests))}
        choices = range(len(prepared.requests))
        self._pieces: dict[int, list[tuple[str, bool]]] = {i: [] for i in choices}
        self._held_tokens: dict[int, list[int]] = {i: [] for i in range(len(prepared.requests))}

    def complete(self, choices: Sequence[Choice]) -> dict[str, Any]:
        prepared = self._prepared
        shown = [
            self._with_figures(
                self._with_prompt(self._choice(at, choices[i]), i, choices), choices[i], choices
            )
            for at, i in enumerate(best(choices, prepared.n, prepared.n_run))
        ]
        value = self._head | {
            "object": self.whole_object,
            "choices": shown,
            "usage": usage_dict(choices, prepared.n_run),
        }
        return value | self._figures(choices) | self._verbose(choices)

    def _verbose(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """llama-server's `__verbose`: the first choice as `/completion` would return it."""
        if not self._prepared.verbose or choices[0].done is None:
            return {}
        text, tokens = "".join(choices[0].text), choices[0].tokens
        final = native_final(
            0,
            choices[0],
            settings=self._prepared.settings_of(0),
            model=str(self._head["model"]),
            prompt=self._prepared.prompt_texts[0],
            content=text,
            tokens=tokens,
        )
        return {"__verbose": final}

    def _with_prompt(
        self,
        value: dict[str, Any],
        i: int,
        choices: Sequence[Choice],
    ) -> dict[str, Any]:
        """Choice i, with its prompt if the answer includes it."""
        return value

    def tail(self, choices: Sequence[Choice]) -> bytes:
        if not self._prepared.include_usage:
            return DONE
        usage = usage_dict(choices, self._prepared.n_run)
        extra = {"choices": [], "usage": usage} | self._figures(choices)
        return self._chunk(dumps(extra)[1:-1]) + DONE

    def error(self, error: PyspecError) -> bytes:
        return sse(error_body(error)) + DONE

    def opening(self, i: int, choice: Choice) -> bytes:
        return b""

    def delta(self, i: int, choice: Choice, event: Delta) -> bytes:
        """A chunk with the released text; values of tokens without text wait for the next chunk."""
        if self._prepared.logprobs:
            self._held[i] += event.logprobs
        if self._prepared.return_tokens:
            self._held_tokens[i] += event.tokens
        tail = ""
        if self._prepared.timings_per_token and event.timings:
            tail = f',"timings":{dumps(timings_dict(event.timings))}'
        if self._prepared.return_pieces:
            self._pieces[i] += pieces(event, self._tokenizer)
        written = list(self._deltas(i, event.text))
        first = self._take_pieces(i) if written else ""
        return b"".join(
            self._chunk(f'"choices":[{delta}]{tail}{"" if n else first}')
            for n, delta in enumerate(written)
        )

    def _take_pieces(self, i: int) -> str:
        """Waiting tokens of choice i as a field of its next chunk."""
        taken, self._pieces[i] = self._pieces[i], []
        return f',"pieces":{dumps(taken)}' if taken else ""

    def finish(self, i: int, choice: Choice) -> bytes:
        assert choice.done is not None
        reason = {"finish_reason": self._finish_reason(i, choice.done)}
        value = self._end_choice(i) | reason | self._take_pending(i)
        extra: dict[str, Any] = {"choices": [value]}
        if not self._prepared.include_usage:  # else the usage chunk has them
            extra |= measured(choice.done.timings) | self._last_usage(choice)
        if i == 0:
            extra |= self._verbose([choice])
        return self._chunk(dumps(extra)[1:-1] + self._take_pieces(i))

    def _last_usage(self, choice: Choice) -> dict[str, Any]:
        """`usage` of a choice's last chunk if the client did not request a usage chunk."""
        return {}

    def progress(self, i: int, event: Progress) -> bytes:
        choice = self._end_choice(i) | {"finish_reason": None}
        value = {"choices": [choice], "prompt_progress": progress_dict(event)}
        if self._prepared.timings_per_token:
            value["timings"] = progress_timings(event)
        return self._chunk(dumps(value)[1:-1])

    def _chunk(self, inner: str) -> bytes:
        return f"data: {self._open},{inner}}}\n\n".encode()

    def _figures(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Timings of the first choice, as in llama-server; several choices have their own, too."""
        done = choices[0].done
        return measured(done.timings) if done else {}

    def _with_figures(
        self,
        value: dict[str, Any],
        choice: Choice,
        choices: Sequence[Choice],
    ) -> dict[str, Any]:
        if self._prepared.return_tokens:
            value["tokens"] = choice.tokens
        return value | measured(choice.done.timings) if len(choices) > 1 and choice.done else value

    def _take_pending(self, i: int) -> dict[str, Any]:
        """Logprobs and tokens that wait for the next chunk of choice i."""
        value: dict[str, Any] = {}
        if self._held[i]:
            value["logprobs"] = self._logprobs(i, self._held[i])
            self._held[i] = []
        if self._held_tokens[i]:
            value["tokens"] = self._held_tokens[i]
            self._held_tokens[i] = []
        return value

    def _finish_reason(self, i: int, done: Done) -> str:
        return finish_reason(done.finish)

    @abstractmethod
    def _choice(self, i: int, choice: Choice) -> dict[str, Any]: ...

    @abstractmethod
    def _deltas(self, i: int, text: str) -> Iterator[str]:
        """A chunk's choice for each piece of the added text."""

    @abstractmethod
    def _end_choice(self, i: int) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, i: int, entries: list[TokenLogprob]) -> dict[str, Any]: ...


class TextAnswer(OpenAIAnswer):
    """`/v1/completions`."""

    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, prepared: PreparedBody, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(prepared, model, tokenizer)
        self._offset = dict.fromkeys(range(len(prepared.requests)), 0)

    def opening(self, i: int, choice: Choice) -> bytes:
        if not self._prepared.echo:
            return b""
        return b"".join(
            self._chunk(f'"choices":[{delta}]')
            for delta in self._deltas(i, self._prepared.prompt_texts[i])
        )

    def _last_usage(self, choice: Choice) -> dict[str, Any]:
        """llama-server sends usage with every stream of this path. With several choices, no single chunk covers all of them."""
        return {"usage": usage_dict([choice], 1)} if len(self._prepared.requests) == 1 else {}

    def _with_prompt(
        self,
        value: dict[str, Any],
        i: int,
        choices: Sequence[Choice],
    ) -> dict[str, Any]:
        prepared, first = self._prepared, i // self._prepared.n_run * self._prepared.n_run
        n = prepared.requests[first].prompt_logprobs
        if prepared.echo:
            value["text"] = prepared.prompt_texts[i] + value["text"]
        if (
            prepared.echo
            and prepared.logprobs
            and n is not None
            and (prompt := prepared.requests[first].prompt)
        ):
            n_top = prepared.requests[i].params.logprobs or 0
            own = value["logprobs"]
            value["logprobs"] = with_prompt(own, choices[first], self._tokenizer, prompt[0], n_top)
        if prepared.tells_prompt:
            value["prompt_logprobs"] = prompt_logprobs(choices[first], self._tokenizer, n or 0)
        return value

    def _choice(self, i: int, choice: Choice) -> dict[str, Any]:
        assert choice.done is not None
        return {
            "index": i,
            "text": "".join(choice.text),
            "logprobs": self._logprobs(i, choice.logprobs) if self._prepared.logprobs else None,
            "finish_reason": finish_reason(choice.done.finish),
        }

    def _deltas(self, i: int, text: str) -> Iterator[str]:
        if text:
            held = self._take_pending(i)
            more = f",{dumps(held)[1:-1]}" if held else ""
            yield f'{{"index":{i},"finish_reason":null,"text":{dumps(text)}{more}}}'

    def _end_choice(self, i: int) -> dict[str, Any]:
        return {"index": i, "text": ""}

    def _logprobs(self, i: int, entries: list[TokenLogprob]) -> dict[str, Any]:
        value = text_logprobs(entries, self._tokenizer, self._offset[i])
        self._offset[i] += sum(len(token) for token in value["tokens"])
        return value
