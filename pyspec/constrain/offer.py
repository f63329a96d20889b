"""Drafts that need no drafter: tokens, and how likely each of them is."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from operator import mul

from pyspec.constrain.phrases import Estimate

LEAST_CHANCE = 0.1  # that a token is reached and right: below that nobody would spend a row on it
MOST_CHANCE = 0.99


@dataclass(slots=True)
class Offer:
    """Tokens that may come next under a grammar.

    chances    that each is right if all before it are
    expected   the same before it is corrected by `estimates`, which hear how it went
    """

    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    estimates: list[Estimate] = field(default_factory=list)

    @property
    def chance(self) -> float:
        """That all of it is right."""
        return prod(self.chances)

    @property
    def chance_of_first(self) -> float:
        """0.0 if there is none."""
        return self.chances[0] if self.chances else 0.0

    @property
    def survival(self) -> list[float]:
        """Of each token, that it is right and all before it."""
        return list(accumulate(self.chances, mul))

    def add(self, token: int, expected: float, estimate: Estimate) -> None:
        """One more."""
        self.tokens.append(token)
        self.chances.append(min(MOST_CHANCE, expected * estimate.factor))
        self.expected.append(expected)
        self.estimates.append(estimate)

    def cut(self, n: int) -> None:
        """Only the first n."""
        for each in (self.tokens, self.chances, self.expected, self.estimates):
            del each[n:]

    def judge(self, n_draft: int, n_accepted: int) -> None:
        """The first `n_draft` were drafted, and of these so many were right."""
        for i in range(min(n_draft, n_accepted + 1, len(self.tokens))):
            self.estimates[i].add(self.expected[i], i < n_accepted)
