"""Several answers to one prompt, the choice of the best ones, and the prompt's own log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspec.errors import RequestError
from pyspec.request import EngineInfo
from pyspec.server.api.answers import LOGPROB_MIN, Choice, logprob_list
from pyspec.server.api.schema import Generate, TextBody
from pyspec.server.settings import Limits
from pyspec.text.tokenizer import Tokenizer


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


def prompt_logprobs(choice: Choice, tokenizer: Tokenizer, n: int) -> list[Any]:
    """vLLM's list: null for the first token, then {id: {logprob, rank, decoded_token}} of each token and of its `n` best alternatives."""
    found: list[Any] = [None] * bool(choice.n_prompt)
    for entry, rank in zip(choice.prompt_logprobs, choice.prompt_ranks, strict=True):
        row = {str(id_): (value, at) for at, (id_, value) in enumerate(entry.top[:n], 1)}
        row[str(entry.token)] = entry.logprob, rank
        found.append(
            {
                id_: {
                    "logprob": max(value, LOGPROB_MIN),
                    "rank": at,
                    "decoded_token": tokenizer.token_bytes(int(id_)).decode("utf-8", "replace"),
                }
                for id_, (value, at) in row.items()
            }
        )
    return found


def with_prompt(
    value: dict[str, Any], choice: Choice, tokenizer: Tokenizer, first: int, n_top: int
) -> dict[str, Any]:
    """`logprobs` of an answer that starts with its prompt, whose first token has no logprob. first: that token."""
    head = {
        "id": first,
        "token": tokenizer.token_bytes(first).decode("utf-8", "replace"),
        "bytes": list(tokenizer.token_bytes(first)),
    }
    first_row = head | {"logprob": None, "top_logprobs": []}
    rows = [first_row, *logprob_list(choice.prompt_logprobs, tokenizer)]
    for row in rows[1:]:
        row["top_logprobs"] = row["top_logprobs"][:n_top]
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row["token"]))
    return {
        "content": [*rows, *value["content"]],
        "tokens": [*(row["token"] for row in rows), *value["tokens"]],
        "token_logprobs": [*(row["logprob"] for row in rows), *value["token_logprobs"]],
        "top_logprobs": [
            *(
                None
                if row["logprob"] is None
                else {t["token"]: t["logprob"] for t in row["top_logprobs"]}
                for row in rows
            ),
            *value["top_logprobs"],
        ],
        "text_offset": [*offsets[:-1], *(offsets[-1] + at for at in value["text_offset"])],
    }
