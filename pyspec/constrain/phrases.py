"""Predicts the next token of a text under a grammar from the tokens before it: keys, punctuation and spelling repeat from text to text.

These drafts need no model. Books are kept by client, because one client's texts must not show in another client's timings.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from operator import mul
from typing import ClassVar

ORDER = 3  # tokens of context
FADE = 0.9  # weight of older counts, at each new one
MOST_NEXT = 8  # followers kept for each context
MOST_PLACES = 20_000  # contexts of one book; up to twice as many are held
MOST_BOOKS = 32
MOST_ALL = 80_000  # contexts of all books; each takes about 400 bytes
TRUST = 0.98  # weight of older verdicts, at each new one


class Estimate:
    """Ratio of the tokens that came to the tokens that were expected."""

    __slots__ = ("came", "expected")

    def __init__(self) -> None:
        self.came = self.expected = 2.0

    def add(self, expected: float, came: bool) -> None:
        self.expected = TRUST * self.expected + expected
        self.came = TRUST * self.came + came

    @property
    def factor(self) -> float:
        return self.came / self.expected


class Phrasebook:
    """Counts of followers. Reads and writes on the engine's thread only."""

    def __init__(self) -> None:
        self._young: dict[tuple[int, ...], dict[int, float]] = {}
        self._old: dict[tuple[int, ...], dict[int, float]] = {}
        self.likely, self.spelled = Estimate(), Estimate()

    @property
    def n_place(self) -> int:
        """Contexts with counts."""
        return len(self._young) + len(self._old)

    def learn(self, before: Sequence[int], token: int) -> None:
        """Count that `token` came behind `before`; only the last few tokens of `before` matter."""
        for place in _places(before):
            seen = self._find(place)
            if seen is None:
                seen = self._room()[place] = {}
            for each in seen:
                seen[each] *= FADE
            seen[token] = seen.get(token, 0.0) + 1.0
            if len(seen) > MOST_NEXT:
                del seen[min(seen, key=seen.__getitem__)]

    def next(self, before: Sequence[int]) -> tuple[int, float] | None:
        """The likeliest token behind `before` and its share, from the longest context with counts."""
        for place in _places(before):
            seen = self._find(place)
            if seen:
                token = max(seen, key=seen.__getitem__)
                return token, seen[token] / (sum(seen.values()) + 0.5)
        return None

    def _find(self, place: tuple[int, ...]) -> dict[int, float] | None:
        seen = self._young.get(place)
        if seen is None:
            seen = self._old.pop(place, None)
            if seen is not None:
                self._room()[place] = seen
        return seen

    def _room(self) -> dict[tuple[int, ...], dict[int, float]]:
        if len(self._young) >= MOST_PLACES:
            self._young, self._old = {}, self._young
        return self._young


def _places(before: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The last tokens, the longest context first; () is the start of a text."""
    if not before:
        yield ()
    for n in range(min(ORDER, len(before)), 0, -1):
        yield tuple(before[len(before) - n :])


class Phrasebooks:
    """The most recent books, by client and grammar. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.books: OrderedDict[tuple[str, str], Phrasebook] = OrderedDict()

    @property
    def n_place(self) -> int:
        """Contexts of all books."""
        return sum(book.n_place for book in self.books.values())

    def of(self, client: str, source: str) -> Phrasebook:
        """The book of texts of `client` under the compiled grammar `source`."""
        with self._lock:
            book = self.books.setdefault((client, source), Phrasebook())
            self.books.move_to_end((client, source))
            while len(self.books) > MOST_BOOKS or (self.n_place > MOST_ALL and len(self.books) > 1):
                self.books.popitem(last=False)
            return book


# -- offers of likely tokens -----------------------------------------------------------------------------------------
# Drafts without a drafter: tokens, each with its probability of acceptance.

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
