"""Sampling parameters, stop strings and draft limits of a validated body."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyspec.errors import RequestError
from pyspec.ranges import Real, rules_of
from pyspec.registry import SUFFIX, spelt_here, split_spec_type
from pyspec.request import (
    DEFAULT_SAMPLERS,
    LAST,
    SAMPLERS,
    EngineInfo,
    Request,
    SamplingParams,
    sampler_of,
)
from pyspec.server.api.schema import SAMPLING, SEED_MAX, ChatBody, Generate, TextBody
from pyspec.server.settings import Limits, ServerSettings
from pyspec.text.tokenizer import Tokenizer

# JSON has 1 for 1.0
FLOATS = frozenset(rule.name for rule in rules_of(SamplingParams) if isinstance(rule.kind, Real))


def sampling_params(
    body: Generate,
    tokenizer: Tokenizer,
    settings: ServerSettings,
) -> SamplingParams:
    """The body's parameters over the server's defaults."""
    said = {name: getattr(body, name) for name in SAMPLING if getattr(body, name) is not None}
    if said.get("top_k", 0) < 0:  # vLLM's spelling of "all"
        said["top_k"] = 0
    for name in said.keys() & FLOATS:
        said[name] = float(said[name])
    if body.dry_sequence_breakers is not None:
        if len(body.dry_sequence_breakers) > settings.limits.breakers:
            raise RequestError(
                f"dry_sequence_breakers: more than {settings.limits.breakers} of them",
            )
        said["dry_sequence_breakers"] = tuple(body.dry_sequence_breakers)
    if body.seed is not None:
        said["seed"] = seed_of(body.seed)
    if body.samplers is not None:
        said |= chain_of(body.samplers)
    if body.logit_bias:
        said["logit_bias"] = bias_pairs(body.logit_bias, tokenizer, settings.limits)
    said["logprobs"] = _n_logprobs(body, settings.limits)
    said["post_sampling"] = bool(body.post_sampling_probs)
    return replace(settings.sampling, **said)


def chain_of(samplers: list[str] | str) -> dict[str, Any]:
    """Sampling parameters of a list of names, or of a string of llama.cpp's letters. Raises RequestError for an unknown name.

    A repeated name counts at its first place. An order that changes nothing becomes the default, which runs on many rows at once.
    """
    names = [_named(name) for name in samplers]
    # adaptive_p picks, so it is last
    order = tuple(dict.fromkeys(name for name in names if name != LAST))
    values: dict[str, Any] = {}
    for name, sampler in SAMPLERS.items():
        if name not in names:
            values |= sampler.off
    is_default = order == tuple(n for n in DEFAULT_SAMPLERS if n in order)
    return values | {"samplers": () if is_default else order}


def _named(name: str) -> str:
    known = sampler_of(name)
    if not known:
        raise RequestError(f"samplers: {name[:40]!r} is not known; there are {', '.join(SAMPLERS)}")
    return known


def seed_of(said: int) -> int:
    """The seed, or -1 to draw one: for -1 and for SEED_MAX, which means the same in llama.cpp. Other negative seeds are read as unsigned."""
    if said in (-1, SEED_MAX):
        return -1
    return said if said >= 0 else said & SEED_MAX


def _n_logprobs(body: Generate, limits: Limits) -> int | None:
    """Number of alternatives to report, from the field of the API in use; None for no logprobs."""
    name, count = "n_probs", body.n_probs or None
    if isinstance(body, TextBody) and body.logprobs is not None:
        name, count = "logprobs", body.logprobs
    if isinstance(body, ChatBody):
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs: it needs logprobs: true")
        if body.logprobs:
            name, count = "top_logprobs", body.top_logprobs or 0
    check_alternatives(name, count, body, limits)
    return count


def check_alternatives(name: str, count: int | None, body: Generate, limits: Limits) -> None:
    """Raise RequestError if an answer would have too many alternatives. A few are allowed at any length, many only for short answers."""
    if count is None or count <= limits.top_logprobs:
        return
    n, most = token_limit(body), limits.top_logprobs
    if n is not None and n >= 0:
        most = min(limits.most_top_logprobs, max(most, limits.alternatives // max(1, n)))
    if count > most:
        length = "an answer without max_tokens" if n is None or n < 0 else f"{n} tokens"
        raise RequestError(
            f"{name}: {count} alternatives; at most {most} are reported for each token of {length}",
        )


def token_limit(body: Generate) -> int | None:
    """The body's limit of answer tokens; None: no limit given. Below 0: as many as fit."""
    limits = (body.max_completion_tokens, body.max_tokens, body.n_predict)
    return next((n for n in limits if n is not None), None)


def bias_pairs(
    bias: Any,
    tokenizer: Tokenizer,
    limits: Limits,
) -> tuple[tuple[int, float], ...]:
    """(id, bias) pairs. A text's bias goes to each of its tokens, false bans a token, and repeated entries add up."""
    pairs = list(bias.items()) if isinstance(bias, dict) else [tuple(pair) for pair in bias]
    if len(pairs) > limits.logit_bias:
        raise RequestError(
            f"logit_bias: {len(pairs)} entries; at most {limits.logit_bias} are taken",
        )
    total: dict[int, float] = {}
    for token, value in pairs:
        amount = -math.inf if value is False else float(value)
        for i in _bias_tokens(token, tokenizer):
            if not 0 <= i < tokenizer.n_vocab:
                raise RequestError(f"logit_bias: token {i} is outside 0..{tokenizer.n_vocab - 1}")
            total[i] = total.get(i, 0.0) + amount
    return tuple(sorted(total.items()))


def _bias_tokens(token: int | str, tokenizer: Tokenizer) -> list[int]:
    if isinstance(token, int):
        return [token]
    if token.isascii() and token.isdecimal():  # OpenAI's object form has ids as strings
        if len(token) > 10:
            raise RequestError(f"logit_bias: token {token[:12]}... is no id")
        return [int(token)]
    return list(tokenizer.encode(token, add_special=False, parse_special=True))


def stop_strings(stop: Any, limits: Limits) -> tuple[str, ...]:
    """Stop strings as a tuple; empty ones never match and are dropped."""
    stops = tuple(text for text in ([stop] if isinstance(stop, str) else stop or ()) if text)
    if len(stops) > limits.stops:
        raise RequestError(f"stop: {len(stops)} strings; at most {limits.stops} are taken")
    for text in stops:
        if len(text.encode()) > limits.stop_bytes:
            raise RequestError(
                f"stop: a string of {len(text.encode())} bytes; at most {limits.stop_bytes} are taken",
            )
    if (n := sum(len(text.encode()) for text in stops)) > limits.all_stop_bytes:
        raise RequestError(
            f"stop: {n} bytes in {len(stops)} strings; at most {limits.all_stop_bytes} are taken",
        )
    return stops


def n_choices(body: Generate, info: EngineInfo) -> tuple[int, int]:
    """(returned answers, generated answers) per prompt. Raises RequestError if impossible."""
    n = body.n or body.n_cmpl or 1
    n_run = body.best_of or n
    for name, value in (("n", n), ("best_of", n_run)):
        if value > info.n_slot:
            raise RequestError(
                f"{name}: {value} choices, but there are {info.n_slot} slots (raise it with -np)",
            )
    if n_run < n:
        raise RequestError(f"best_of: {n_run} answers are fewer than the {n} to be shown (n)")
    if n_run > n and body.stream:
        raise RequestError(
            "best_of: the best answer is known only at the end, so it cannot be streamed",
        )
    if n_run > n and body.post_sampling_probs:
        raise RequestError(
            "best_of: answers are compared by the model's own probabilities; leave post_sampling_probs out"
        )
    return n, n_run


def n_prompt_logprobs(body: Generate, limits: Limits) -> int | None:
    """Alternatives to report for each prompt token; None: no prompt logprobs."""
    echoes = isinstance(body, TextBody) and bool(body.echo)
    echoed = body.logprobs if isinstance(body, TextBody) and echoes else None
    wanted = [n for n in (body.prompt_logprobs, echoed) if n is not None]
    if (n_top := max(wanted, default=0)) > limits.top_logprobs:  # a prompt may be long
        raise RequestError(
            f"prompt_logprobs: {n_top} alternatives; at most {limits.top_logprobs} are reported",
        )
    if wanted and body.stream:
        raise RequestError("prompt_logprobs, or echo with logprobs: ask for them without stream")
    return max(wanted, default=None)


def draft_limit(body: Generate, info: EngineInfo) -> int | None:
    """The most draft tokens per round: None lets the engine decide, 0 switches drafting off.

    Drafting never changes the text, so requesting it from an engine without a drafter is no error.
    """
    wanted = body.speculative
    spec = wanted if isinstance(wanted, dict) else {}
    kind = body.spec_type or spec.get("type")
    if wanted is False or kind == "none":
        return 0
    if kind is not None:
        name, with_suffixes = split_spec_type(kind)
        asked = {spelt_here(name)} - {"auto", "none"} | ({SUFFIX} if with_suffixes else set())
        loaded = [info.drafter, *[SUFFIX] * (info.has_suffixes and info.drafter != SUFFIX)]
        if missing := ", ".join(sorted(asked.difference(loaded))):
            raise RequestError(
                f"speculative.type: {missing[:40]!r} is not loaded; this engine drafts with {', '.join(loaded)}",
            )
    for limit in (body.spec_n_max, spec.get("n_max"), spec.get("k_max")):
        if limit is not None:
            return limit if limit >= 0 else None
    return None


def settings_dict(params: SamplingParams, eog_ids: Sequence[int] = ()) -> dict[str, Any]:
    """Sampling parameters under llama-server's names, for generation_settings, /props and /slots. A ban is null: JSON has no minus infinity.

    eog_ids  tokens that `ignore_eos` bans
    """
    banned = dict.fromkeys(eog_ids, -math.inf) if params.ignore_eos else {}
    bias = dict(params.logit_bias) | banned
    return {
        "seed": SEED_MAX if params.seed == -1 else params.seed,
        **{name: getattr(params, name) for name in SAMPLING},
        "dry_sequence_breakers": list(params.dry_sequence_breakers),
        "n_probs": params.logprobs or 0,
        "logit_bias": [
            {"token": id_, "bias": None if value == -math.inf else value} for id_, value in bias.items()
        ],
        "samplers": list(params.samplers or DEFAULT_SAMPLERS),
        "post_sampling_probs": params.post_sampling,
    }


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
