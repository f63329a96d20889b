"""Compares answers with recorded ones (tests/real): token ids, log probabilities, greedy texts.

answers.json  of llama.cpp (record_real.py)
exact.json    of the model's formulas in F64 (real_exact.py)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "real"
ANSWERS, EXACT = FOLDER / "answers.json", FOLDER / "exact.json"
N_TOKEN = 32  # of an answer
N_TOP, N_TOP_POSITION = 10, 8  # likeliest tokens that are recorded, at so many first positions
Scores = Sequence[Mapping[int, float]]
"""By position, log probabilities of the likeliest tokens, and of the one that follows."""


@dataclass(frozen=True)
class Answer:
    """A greedy text that continues a prompt.

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
    """A prompt with its ids, and three answers.

    exact      of the formulas in F64
    f32        of llama.cpp with the same weights as F32
    quantised  of llama.cpp with the file as it is, so with activations of 8 bits
    """

    name: str
    text: str
    parse_special: bool
    ids: tuple[int, ...]
    exact: Answer
    f32: Answer
    quantised: Answer


@dataclass(frozen=True)
class Recorded:
    """The records. program: gave the ids and two of the answers. strings: texts with their ids, every other one with control tokens parsed."""

    program: str
    strings: tuple[tuple[str, tuple[int, ...]], ...]
    cases: tuple[Case, ...]


def read(folder: Path = FOLDER) -> Recorded:
    """Prompts and answers. Raises FileNotFoundError."""
    prompts = {p["name"]: p for p in json.loads((folder / "prompts.json").read_text(encoding="utf-8"))}
    found = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
    exact = json.loads((folder / "exact.json").read_text(encoding="utf-8"))
    cases = []
    for row in found["prompts"]:
        prompt = prompts[row["name"]]
        parse = prompt.get("parse_special", True)
        answers = [_answer(of) for of in (exact[row["name"]], row["f32"], row["quantised"])]
        cases.append(Case(row["name"], prompt["text"], parse, tuple(row["ids"]), *answers))
    strings = tuple((text, tuple(ids)) for text, ids in found["strings"])
    return Recorded(found["program"], strings, tuple(cases))


def _answer(row: Mapping[str, list]) -> Answer:
    """The end token is recorded, too, as the last one."""
    n = len(row["tokens"]) - bool(row["ended"])
    top = tuple(tuple((token, value) for token, value in position) for position in row["top"][:n])
    return Answer(
        tuple(row["tokens"][:n]),
        bool(row["ended"]),
        tuple(row["logprobs"][:n]),
        tuple(row["second"][:n]),
        top,
    )


def parting(recorded: Answer, tokens: Sequence[int]) -> int | None:
    """The first position at which a greedy text differs from the recorded one, or is shorter. None: it is equal."""
    for position, token in enumerate(recorded.tokens):
        if position >= len(tokens) or tokens[position] != token:
            return position
    return None if len(tokens) == len(recorded.tokens) else len(recorded.tokens)


def is_tie(recorded: Answer, position: int, logprob: float, bound: float) -> bool:
    """Whether rounding may have swapped the two best tokens there: both are nearer to each other than the bound, and the other text's token,
    whose log probability is given, is the second best one by its value.
    """
    if position >= len(recorded.tokens):
        return False
    return recorded.gap(position) < bound and abs(logprob - recorded.second[position]) <= bound


@dataclass(frozen=True)
class Difference:
    """A log probability of a token, recorded and found."""

    position: int
    token: int
    recorded: float
    found: float

    @property
    def size(self) -> float:
        return abs(self.recorded - self.found)


def farthest(recorded: Answer, tokens: Sequence[int], scores: Scores) -> Difference:
    """The largest difference of log probabilities at the positions in front of which both texts are equal.

    A recorded token that is not among the likeliest here is as likely as the last of them, at most.
    """
    at = parting(recorded, tokens)
    n = len(recorded.tokens) if at is None else at + 1
    found = []
    for position, (here, token, logprob) in enumerate(
        zip(scores[:n], recorded.tokens, recorded.logprobs, strict=False)
    ):
        top = recorded.top[position] if position < len(recorded.top) else ()
        least = min(here.values())
        for other, value in ((token, logprob), *top):
            found.append(Difference(position, other, value, here.get(other, min(value, least))))
    return max(
        found,
        key=lambda difference: difference.size,
        default=Difference(0, recorded.tokens[0], 0.0, 0.0),
    )


def scores_of(recorded: Answer) -> Scores:
    """The log probabilities that an answer holds."""
    n_top = len(recorded.top)
    return [
        dict(recorded.top[i] if i < n_top else ()) | {token: logprob}
        for i, (token, logprob) in enumerate(zip(recorded.tokens, recorded.logprobs, strict=True))
    ]
