"""Log probabilities of tokens in the forms of OpenAI, llama-server and vLLM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from pyspec.request import TokenLogprob
from pyspec.slots.images import is_image
from pyspec.text.tokenizer import Tokenizer

LOGPROB_MIN = -9999.0  # JSON has no minus infinity


def token_entry(token: int, logprob: float | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """A token with its text, its bytes, and its log probability."""
    raw = b"[image]" if is_image(token) else tokenizer.token_bytes(token)
    value = None if logprob is None or is_image(token) else max(logprob, LOGPROB_MIN)
    return {"id": token, "token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": value}


def logprob_list(
    entries: Sequence[TokenLogprob], tokenizer: Tokenizer, n_top: int | None = None
) -> list[dict[str, Any]]:
    """Tokens in the form of OpenAI's chat logprobs and of llama-server's `completion_probabilities`. n_top: alternatives of each, all by default"""
    return [
        token_entry(e.token, e.logprob, tokenizer)
        | {"top_logprobs": [token_entry(*alt, tokenizer) for alt in e.top[:n_top]]}
        for e in entries
    ]


def sampled_list(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Probabilities after the samplers (`post_sampling_probs`), in llama-server's form: `prob` and `top_probs`."""

    def entry(value: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value[key] for key in ("id", "token", "bytes")}
        return kept | {"prob": math.exp(value["logprob"])}

    return [
        entry(value) | {"top_probs": [entry(alt) for alt in value["top_logprobs"]]}
        for value in logprob_list(entries, tokenizer)
    ]


def text_logprobs(rows: list[dict[str, Any]], offset: int = 0) -> dict[str, Any]:
    """`logprobs` of /v1/completions: llama-server's `content` and OpenAI's four parallel lists. rows: as of `logprob_list`"""
    offsets = list(accumulate((len(row["token"]) for row in rows), initial=offset))
    return {
        "content": rows,
        "tokens": [row["token"] for row in rows],
        "token_logprobs": [row["logprob"] for row in rows],
        "top_logprobs": [
            None
            if row["logprob"] is None
            else {alt["token"]: alt["logprob"] for alt in row["top_logprobs"]}
            for row in rows
        ],
        "text_offset": offsets[:-1],
    }


def prompt_rows(
    prompt: Sequence[int], entries: Sequence[TokenLogprob], tokenizer: Tokenizer, n_top: int
) -> list[dict[str, Any]]:
    """A prompt's tokens in the form of `logprob_list`. The first one has no log probability. entries: of the others"""
    first = token_entry(prompt[0], None, tokenizer) | {"top_logprobs": []}
    return [first, *logprob_list(entries, tokenizer, n_top)]


def prompt_logprobs(
    entries: Sequence[TokenLogprob], ranks: Sequence[int], tokenizer: Tokenizer, n: int
) -> list[Any]:
    """vLLM's rows of a prompt's tokens but the first: {id: {logprob, rank, decoded_token}} of each and of its `n` best alternatives. None
    for rows of pictures."""
    found: list[Any] = []
    for entry, rank in zip(entries, ranks, strict=True):
        if is_image(entry.token):
            found.append(None)
            continue
        row = {id_: (value, at) for at, (id_, value) in enumerate(entry.top[:n], 1)}
        row[entry.token] = entry.logprob, rank
        found.append(
            {
                str(id_): {
                    "logprob": max(value, LOGPROB_MIN),
                    "rank": at,
                    "decoded_token": tokenizer.token_bytes(id_).decode("utf-8", "replace"),
                }
                for id_, (value, at) in row.items()
            }
        )
    return found
