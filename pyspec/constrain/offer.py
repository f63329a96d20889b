"""Drafts without a drafter: tokens, each with its probability of acceptance."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from operator import mul
from typing import ClassVar

from pyspec.constrain.phrases import Estimate

LEAST_CHANCE = 0.1  # of acceptance; less likely tokens are not worth a row
MOST_CHANCE = 0.99


@dataclass(slots=True)
class Offer:
    """Tokens that may come next under a grammar.

    chances    probability of each token, if all tokens before it are right
    expected   the same before the correction by `estimates`, which learn the outcome
    """

    source: ClassVar[str] = "grammar"
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    estimates: list[Estimate] = field(default_factory=list)

    @property
    def chance(self) -> float:
        """The probability that all tokens are right."""
        return prod(self.chances)

    @property
    def chance_of_first(self) -> float:
        """The probability of the first token; 0.0 if there is none."""
        return self.chances[0] if self.chances else 0.0

    @property
    def survival(self) -> list[float]:
        """For each token, the probability that it and all tokens before it are right."""
        return list(accumulate(self.chances, mul))

    def add(self, token: int, expected: float, estimate: Estimate) -> None:
        """Append a token."""
        self.tokens.append(token)
        self.chances.append(min(MOST_CHANCE, expected * estimate.factor))
        self.expected.append(expected)
        self.estimates.append(estimate)

    def cut(self, n: int) -> None:
        """Keep the first n tokens."""
        for each in (self.tokens, self.chances, self.expected, self.estimates):
            del each[n:]

    def judge(self, n_draft: int, n_accepted: int) -> None:
        """Report that the first `n_draft` tokens were drafted and `n_accepted` of them were right."""
        for i in range(min(n_draft, n_accepted + 1, len(self.tokens))):
            self.estimates[i].add(self.expected[i], i < n_accepted)
