"""llama-server's `/completion` format, complete and streamed. A stream ends with its final object and has no [DONE]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspec.request import Delta, Done, Progress, TokenLogprob
from pyspec.server.api.answers import Answer, best, sse, timings_dict
from pyspec.server.api.logprobs import logprob_list, sampled_list

_NOTHING = object()


class NativeAnswer(Answer):
    """`/completion`: one object, or a list for several prompts or choices."""

    def complete(self) -> Any:
        shown = best(self.choices, self._prepared.n, self._prepared.n_run)
        values = [self._picked(self._whole(i) | {"index": at}) for at, i in enumerate(shown)]
        return values[0] if len(values) == 1 else values

    def delta(self, i: int, event: Delta) -> bytes:
        """Send tokens as they arrive, even while their text is held back."""
        value = self._partial(i) | {"content": event.text, "tokens": list(event.tokens)}
        if event.logprobs:
            value["completion_probabilities"] = self._probabilities(i, event.logprobs)
        if self._prepared.timings_per_token and event.timings:
            value["timings"] = timings_dict(event.timings)
        return sse(value)

    def progress(self, i: int, event: Progress) -> bytes:
        nowhere = {"id_slot": -1, "tokens_predicted": 0, "tokens_evaluated": event.n_prompt}
        return sse(self._partial(i) | nowhere | self._progress_fields(event))

    def finish(self, i: int, done: Done) -> bytes:
        return sse(self._picked(self._native(i, "", [])))

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

    def _probabilities(self, i: int, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        listed = sampled_list if self._prepared.requests[i].params.post_sampling else logprob_list
        return listed(entries, self._tokenizer)

    def _partial(self, i: int) -> dict[str, Any]:
        choice = self.choices[i]
        return {
            "index": i,
            "content": "",
            "tokens": [],
            "stop": False,
            "id_slot": choice.slot,
            "tokens_predicted": choice.n_predicted,
            "tokens_evaluated": choice.n_prompt,
        }

    def _whole(self, i: int) -> dict[str, Any]:
        choice = self.choices[i]
        tokens = choice.tokens if self._prepared.return_tokens else []
        value = self._native(i, "".join(choice.text), tokens)
        if self._prepared.logprobs:
            value["completion_probabilities"] = self._probabilities(i, choice.logprobs)
        return value
