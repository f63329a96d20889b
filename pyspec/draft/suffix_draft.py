"""A suffix draft: tokens that followed before, and the chances that they do again.

The chances are learned: of followers, and of what drafts keep of their promises, in tables that C++ reads and writes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import accumulate
from operator import mul
from typing import ClassVar

from pyspec.registry import SUFFIX

LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # longest match of each group; longer ones are a group
ONCE, FEW, ALWAYS = (0.8, 1.8), (0.92, 0.5), (0.97, 0.2)
PROMISES = (1.0, 2.0, 4.0, 8.0)  # tokens that a draft promises: groups
# assumed ratio of promises, its weight in tokens, and the weight of older drafts
FIRST_RATIO, ALL_PRIOR, ALL_TRUST = 0.8, 12.0, 0.98
# Of one text: weight of the ratio of all, in tokens, and of older drafts
TEXT_WEIGHT, TEXT_TRUST = 6.0, 0.9


class SuffixChances:
    """How often the likeliest follower of a match came and was seen, and the first guess, by length and share, of all texts."""

    def __init__(self) -> None:
        guesses = (_guesses(length) for length in (*LENGTHS, 2 * LENGTHS[-1]))
        self.guess = array("d", [each for group in guesses for each in group])
        self.came, self.seen = (array("d", bytes(8 * len(self.guess))) for _ in range(2))


def _guesses(length: int) -> list[float]:
    """As in prose; copies do better. Of followers with a share of up to 0.5, 0.75, 0.9, 0.999 and more, and of those that were the only
    one: seen once, up to thrice, oftener."""
    return [0.15, 0.35, 0.7, 0.85, 0.9, *(guess(length, only) for only in (ONCE, FEW, ALWAYS))]


def guess(length: int, only: tuple[float, float] = FEW) -> float:
    """The chance of the only follower of a match of so many tokens."""
    most, half = only
    return most * length / (length + half)


class Promise:
    """Ratio of the drafted tokens that were right to those that were promised, by the number of these.

    It is of one text, and starts from that of all texts. A chance of single tokens does not show whether a text copies or only repeats
    phrases, and of two estimates the larger one is too large more often.
    """

    __slots__ = ("kept", "of_all", "promised")

    def __init__(self, of_all: Promise | None = None) -> None:
        self.of_all = of_all
        self.kept, self.promised = (array("d", [0.0] * (len(PROMISES) + 1)) for _ in range(2))

    def add(self, size: float, promised: float, kept: int) -> None:
        """Learn from a draft, verified or only compared with the tokens that came. size: tokens that the whole draft promised; promised: its
        judged part."""
        i, trust = bisect_left(PROMISES, size), ALL_TRUST if self.of_all is None else TEXT_TRUST
        self.kept[i] = trust * self.kept[i] + kept
        self.promised[i] = trust * self.promised[i] + promised
        if self.of_all is not None:
            self.of_all.add(size, promised, kept)

    def factor(self, size: float) -> float:
        """The share that a draft keeps if it promises `size` tokens."""
        i = bisect_left(PROMISES, size)
        first, weight = (
            (FIRST_RATIO, ALL_PRIOR) if self.of_all is None else (self.of_all.factor(size), TEXT_WEIGHT)
        )
        return min(1.0, (self.kept[i] + weight * first) / (self.promised[i] + weight))


class SuffixDraft:
    """Tokens that followed before.

    chances   of each token, if all before it are right
    survival  for each token, the probability that it and all tokens before it are right
    expected  tokens that will be right
    """

    __slots__ = ("_promise", "chances", "expected", "survival", "tokens")
    source: ClassVar[str] = SUFFIX

    def __init__(
        self,
        tokens: list[int],
        chances: list[float],
        promise: Promise,
        known: tuple[list[float], float] | None = None,
    ) -> None:
        """promise: the share that drafts like it keep. known: survival and expected tokens, if they are."""
        self.tokens, self.chances, self._promise = tokens, chances, promise
        if known is None:
            found = self._found()
            size = total(found)
            factor = promise.factor(size)
            known = [factor * each for each in found], factor * size
        self.survival, self.expected = known

    def _found(self) -> list[float]:
        return list(accumulate(self.chances, mul))

    @property
    def chance_of_first(self) -> float:
        return self.survival[0] if self.survival else 0.0

    def first(self, n: int) -> SuffixDraft:
        """The first n tokens."""
        return (
            self
            if n >= len(self.tokens)
            else SuffixDraft(self.tokens[:n], self.chances[:n], self._promise)
        )

    def judge(self, n_draft: int, n_accepted: int) -> None:
        """Report that the first `n_draft` tokens were drafted and `n_accepted` of them were right."""
        if n_draft and self.tokens:
            found = self._found()
            self._promise.add(total(found), total(found[:n_draft]), n_accepted)


def total(numbers: list[float]) -> float:
    """The sum, rounded at each step in every version of Python."""
    found = 0.0
    for each in numbers:
        found += each
    return found


NO_DRAFT = SuffixDraft([], [], Promise(), ([], 0.0))
