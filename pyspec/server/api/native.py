"""llama-server's `/completion` format, complete and streamed. A stream ends with its final object and has no [DONE]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspec.errors import PyspecError
from pyspec.request import Delta, Progress, TokenLogprob
from pyspec.server.api.answers import (
    PING,
    Choice,
    logprob_list,
    native_final,
    progress_dict,
    progress_timings,
    sampled_list,
    sse,
    timings_dict,
)
from pyspec.server.api.choices import best
from pyspec.server.api.prepared import PreparedBody
from pyspec.server.http.envelope import error_body
from pyspec.text.tokenizer import Tokenizer

_NOTHING = object()


class NativeAnswer:
    """`/completion`: one object, or a list for several prompts or choices."""

    ping = PING

    def __init__(self, prepared: PreparedBody, model: str, tokenizer: Tokenizer) -> None:
        self._prepared = prepared
        self._model = model
        self._tokenizer = tokenizer

    def complete(self, choices: Sequence[Choice]) -> Any:
        shown = best(choices, self._prepared.n, self._prepared.n_run)
        values = [
            self._picked(self._final(i, choices[i], streamed=False) | {"index": at})
            for at, i in enumerate(shown)
        ]
        return values[0] if len(values) == 1 else values

    def opening(self, i: int, choice: Choice) -> bytes:
        return b""

    def delta(self, i: int, choice: Choice, event: Delta) -> bytes:
        """Send tokens as they arrive, even while their text is held back."""
        value = self._partial(i, choice) | {"content": event.text, "tokens": list(event.tokens)}
        if event.logprobs:
            value["completion_probabilities"] = self._probabilities(i, event.logprobs)
        if self._prepared.timings_per_token and event.timings:
            value["timings"] = timings_dict(event.timings)
        return sse(value)

    def progress(self, i: int, event: Progress) -> bytes:
        progress = {"prompt_progress": progress_dict(event)}
        value = self._partial(i, Choice(n_prompt=event.n_prompt)) | progress
        if self._prepared.timings_per_token:
            value["timings"] = progress_timings(event)
        return sse(value)

    def finish(self, i: int, choice: Choice) -> bytes:
        return sse(self._picked(self._final(i, choice, streamed=True)))

    def _picked(self, value: dict[str, Any]) -> dict[str, Any]:
        """The object's fields named by `response_fields`, each a path with slashes; missing ones are left out."""
        if not self._prepared.response_fields:
            return value
        picked: dict[str, Any] = {}
        for path in self._prepared.response_fields:
            at: Any = value
            for key in path.split("/"):
                at = at.get(key, _NOTHING) if isinstance(at, dict) else _NOTHING
            if at is not _NOTHING:
                picked[path] = at
        return picked

    def tail(self, choices: Sequence[Choice]) -> bytes:
        return b""

    def error(self, error: PyspecError) -> bytes:
        return sse(error_body(error))

    def _probabilities(self, i: int, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        listed = sampled_list if self._prepared.requests[i].params.post_sampling else logprob_list
        return listed(entries, self._tokenizer)

    def _partial(self, i: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": i,
            "content": "",
            "tokens": [],
            "stop": False,
            "id_slot": choice.slot,
            "tokens_predicted": choice.n_predicted,
            "tokens_evaluated": choice.n_prompt,
        }

    def _final(self, i: int, choice: Choice, *, streamed: bool) -> dict[str, Any]:
        value = native_final(
            i,
            choice,
            settings=self._prepared.settings_of(i),
            model=self._model,
            prompt=self._prepared.prompt_texts[i],
            content="" if streamed else "".join(choice.text),
            tokens=choice.tokens if self._prepared.return_tokens and not streamed else [],
        )
        if self._prepared.logprobs and not streamed:
            value["completion_probabilities"] = self._probabilities(i, choice.logprobs)
        return value
