"""Compares answers with those that llama.cpp gave (tests/real/answers.json): token ids, log probabilities, greedy texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "real"
ANSWERS = FOLDER / "answers.json"
Scores = Sequence[Mapping[int, float]]
"""By position, log probabilities of the likeliest tokens, and of the one that follows."""


@dataclass(frozen=True)
class Answer:
    """A greedy text as llama.cpp continued a prompt.

    ended     an end-of-generation token follows; `tokens` do not hold it
    logprobs  of each token
    second    of the second best token in its place
    top       the likeliest tokens of the first positions with their log probabilities
    """

    tokens: tuple[int, ...]
    ended: bool
    logprobs: tuple[float, ...]
    second: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]

    def gap(self, position: int) -> float:
        """How much likelier the chosen token is than the second best."""
        return self.logprobs[position] - self.second[position]


@dataclass(frozen=True)
class Case:
    """A prompt with its ids, and two answers: with the file's weights, and with the same weights as F32."""

    name: str
    text: str
    parse_special: bool
    ids: tuple[int, ...]
    quantised: Answer
    f32: Answer


@dataclass(frozen=True)
class Recorded:
    """Answers of one program. strings: texts with their ids, every other one with control tokens parsed."""

    program: str
    strings: tuple[tuple[str, tuple[int, ...]], ...]
    cases: tuple[Case, ...]


def read(folder: Path = FOLDER) -> Recorded:
    """Prompts and answers. Raises FileNotFoundError."""
    prompts = {p["name"]: p for p in json.loads((folder / "prompts.json").read_text(encoding="utf-8"))}
    found = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
    cases = []
    for row in found["prompts"]:
        prompt = prompts[row["name"]]
        parse = prompt.get("parse_special", True)
        answers = (_answer(row["quantised"]), _answer(row["f32"]))
        cases.append(Case(row["name"], prompt["text"], parse, tuple(row["ids"]), *answers))
    strings = tuple((text, tuple(ids)) for text, ids in found["strings"])
    return Recorded(found["program"], strings, tuple(cases))


def _answer(row: Mapping[str, list]) -> Answer:
    """llama.cpp lists the end token, too, as the last one."""
    n = len(row["tokens"]) - bool(row["ended"])
    top = tuple(tuple((token, value) for token, value in position) for position in row["top"][:n])
    return Answer(
        tuple(row["tokens"][:n]), bool(row["ended"]), tuple(row["logprobs"][:n]), tuple(row["second"][:n]), top
    )


def parting(recorded: Answer, tokens: Sequence[int]) -> int | None:
    """The first position at which a greedy text differs from the recorded one, or is shorter. None: it is equal."""
    for position, token in enumerate(recorded.tokens):
        if position >= len(tokens) or tokens[position] != token:
            return position
    return None if len(tokens) == len(recorded.tokens) else len(recorded.tokens)


def is_tie(recorded: Answer, position: int, bound: float) -> bool:
    """Whether rounding may swap the two best tokens there: each of their log probabilities may be off by the bound."""
    return position < len(recorded.tokens) and recorded.gap(position) <= 2 * bound


def distance(recorded: Answer, scores: Scores) -> float:
    """The largest difference between recorded log probabilities and those along the same tokens.

    A recorded token that is not among the likeliest here is as likely as the last of them, at most.
    """
    worst = 0.0
    for position, (token, logprob) in enumerate(zip(recorded.tokens, recorded.logprobs, strict=True)):
        here = scores[position]
        least = min(here.values())
        worst = max(worst, abs(here[token] - logprob))
        for other, value in recorded.top[position] if position < len(recorded.top) else ():
            worst = max(worst, abs(here[other] - value) if other in here else value - least)
    return worst


def spread(case: Case) -> float:
    """How far apart the two records of llama.cpp are, where their texts are equal: by its own rounding of inputs to 8 bits."""
    equal = parting(case.f32, case.quantised.tokens)
    n = len(case.f32.tokens) if equal is None else min(equal, len(case.f32.tokens))
    pairs = zip(case.f32.logprobs[:n], case.quantised.logprobs[:n], strict=True)
    return max((abs(one - other) for one, other in pairs), default=0.0)
