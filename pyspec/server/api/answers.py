"""Answer objects in the shapes of OpenAI and llama-server, and the parts that they share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from pyspec.errors import PyspecError, Unavailable
from pyspec.request import (
    Delta,
    Done,
    Event,
    Finish,
    Progress,
    PromptLogprobs,
    Request,
    Started,
    Timings,
    TokenLogprob,
)
from pyspec.server.api.params import settings_dict
from pyspec.server.http.envelope import dumps
from pyspec.text.tokenizer import Tokenizer

STOP_TYPE = {"eos": "eos", "stop": "word", "length": "limit"}
FINGERPRINT = "b1-pyspec"
PING = b": ping\n\n"
LOGPROB_MIN = -9999.0  # JSON has no minus infinity


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


class Answer(Protocol):
    """Converts choices to one object, or their events to server-sent events. Empty bytes: nothing to send."""

    ping: bytes  # keeps a silent stream open

    def complete(self, choices: Sequence[Choice]) -> Any: ...

    def opening(self, i: int, choice: Choice) -> bytes:
        """The request has a slot; no token has been generated yet."""
        ...

    def delta(self, i: int, choice: Choice, event: Delta) -> bytes: ...

    def progress(self, i: int, event: Progress) -> bytes: ...

    def finish(self, i: int, choice: Choice) -> bytes: ...

    def tail(self, choices: Sequence[Choice]) -> bytes: ...

    def error(self, error: PyspecError) -> bytes: ...


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return f"data: {dumps(value)}\n\n".encode()


def ending(done: Done) -> Finish:
    """An answer's finish reason for clients. If its grammar was complete, as if the model had ended it, because no stop string did."""
    return "eos" if done.finish == "stop" and not done.stop_string else done.finish


def unfinished(done: Done) -> PyspecError | None:
    """The error behind a Done that is no answer. The client did not cancel, so the engine is stopping."""
    if done.finish == "cancelled":
        return Unavailable("the request was cancelled: the server is shutting down")
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


def logprob_list(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Token entries in the form of OpenAI's chat logprobs and of llama-server's `completion_probabilities`."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        text = raw.decode("utf-8", "replace")
        value = max(logprob, LOGPROB_MIN)
        return {"id": token, "token": text, "bytes": list(raw), "logprob": value}

    alternatives = [[entry(*alt) for alt in e.top] for e in entries]
    tokens = [entry(e.token, e.logprob) for e in entries]
    return [token | {"top_logprobs": top} for token, top in zip(tokens, alternatives, strict=True)]


def sampled_list(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Probabilities after the samplers (`post_sampling_probs`), in llama-server's form: `prob` and `top_probs`."""

    def entry(value: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value[key] for key in ("id", "token", "bytes")}
        return kept | {"prob": math.exp(value["logprob"])}

    return [
        entry(value) | {"top_probs": [entry(alt) for alt in value["top_logprobs"]]}
        for value in logprob_list(entries, tokenizer)
    ]


def text_logprobs(
    entries: Sequence[TokenLogprob],
    tokenizer: Tokenizer,
    offset: int = 0,
) -> dict[str, Any]:
    """`logprobs` of /v1/completions: llama-server's `content` and OpenAI's four parallel lists."""
    content = logprob_list(entries, tokenizer)
    offsets: list[int] = []
    for item in content:
        offsets.append(offset)
        offset += len(item["token"])
    return {
        "content": content,
        "tokens": [item["token"] for item in content],
        "token_logprobs": [item["logprob"] for item in content],
        "top_logprobs": [
            {alt["token"]: alt["logprob"] for alt in item["top_logprobs"]} for item in content
        ],
        "text_offset": offsets,
    }


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


def progress_timings(event: Progress) -> dict[str, Any]:
    """llama-server's `timings` during the prompt."""
    n = event.n_processed - event.n_cached
    return timings_dict(Timings(cache_n=event.n_cached, prompt_n=n, prompt_ms=event.ms))


def generation_settings(
    request: Request,
    of_body: Mapping[str, Any],
    eog_ids: Sequence[int],
) -> dict[str, Any]:
    """The parsed request under llama-server's names. of_body: values that only the body has."""
    return settings_dict(request.params, eog_ids) | {
        "n_predict": request.max_tokens,
        "max_tokens": request.max_tokens,
        "n_keep": 0,  # the context never shifts, so nothing is kept or discarded
        "n_discard": 0,
        "stop": list(request.stop),
        "cache_prompt": request.cache_prompt,
        "t_max_predict_ms": request.max_predict_ms,
        "timings_per_token": request.timings_per_token,
        "speculative.n_max": request.n_draft_max,
        "grammar": request.grammar.source if request.grammar else "",
        "grammar_lazy": bool(request.grammar and request.grammar.lazy),
        "grammar_triggers": [],
        "preserved_tokens": list(request.shown),
        "backend_sampling": False,
        "lora": [],
        **of_body,
    }


def native_final(
    index: int,
    choice: Choice,
    *,
    settings: dict[str, Any],
    model: str,
    prompt: str,
    content: str,
    tokens: list[int],
) -> dict[str, Any]:
    """The last, or only, object of `/completion`. `content` and `tokens` are empty at the end of a stream."""
    done = choice.done
    assert done is not None
    return {
        "index": index,
        "content": content,
        "tokens": tokens,
        "id_slot": done.slot if done.slot >= 0 else choice.slot,
        "stop": True,
        "model": model,
        "tokens_predicted": done.n_predicted,
        "tokens_evaluated": done.n_prompt,
        "generation_settings": settings,
        "prompt": prompt,
        "has_new_line": choice.has_new_line,
        "truncated": done.truncated,
        "stop_type": STOP_TYPE.get(ending(done), "none"),
        "stopping_word": done.stop_string,
        "tokens_cached": max(0, done.n_prompt + done.n_predicted - 1),
        **measured(done.timings),
    }
