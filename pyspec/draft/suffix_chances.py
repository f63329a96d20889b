"""How often the likeliest follower of a match came, by the match's length and the follower's share.

Every token of an answer is a verdict, drafted or not: it is compared with the follower that a draft would have had. So these
chances stay true while nothing is drafted, and learning costs no row.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

from pyspec.draft.suffix_automaton import Branch

LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # longest match of each group; longer ones are a group
SHARES = (0.5, 0.75, 0.9, 0.999)  # of a follower that is not the only one
# an only follower, seen once, up to thrice, oftener
SINGLE, FEW, ALWAYS = range(len(SHARES) + 1, len(SHARES) + 4)
N_SHARE = ALWAYS + 1
GROUP = [bisect_left(LENGTHS, length) for length in range(LENGTHS[-1] + 2)]  # of each length
PRIOR = 6.0  # verdicts that the first guess is worth
MEMORY = 400.0  # verdicts of a group, before older ones count half
MOST_CHANCE = 0.99
TRUST, TEXT_PRIOR = (
    0.9,
    2.0,
)  # of one text: weight of older verdicts, and tokens expected before the first
PROMISES = (1.0, 2.0, 4.0, 8.0)  # tokens that a draft promises: groups
# assumed ratio of promises, its weight in tokens, and the weight of older drafts
FIRST_RATIO, ALL_PRIOR, ALL_TRUST = 0.8, 12.0, 0.98
TEXT_WEIGHT, TEXT_TRUST = (
    6.0,
    0.9,
)  # of one text: weight of the ratio of all, in tokens, and of older drafts
LEAST_FACTOR, MOST_FACTOR = 0.1, 1.1


def _group(length: int, branch: Branch) -> int:
    """Place of a group in the tables."""
    if branch.n < branch.n_all:
        share = bisect_left(SHARES, branch.n / branch.n_all)
    else:
        share = SINGLE if branch.n == 1 else FEW if branch.n <= 3 else ALWAYS
    return N_SHARE * GROUP[min(length, LENGTHS[-1] + 1)] + share


class SuffixChances:
    """Learned from all texts: how often a follower came and was seen, and the first guess, by length and share. C++ shares these numbers."""

    def __init__(self) -> None:
        lengths = (*LENGTHS, 2 * LENGTHS[-1])
        self.guess = array(
            "d", [_guess(length, share) for length in lengths for share in range(N_SHARE)]
        )
        self.came, self.seen = (array("d", bytes(8 * len(self.guess))) for _ in range(2))

    def of(self, length: int, branch: Branch) -> float:
        """The chance that `branch` comes behind a match of `length` tokens."""
        i = _group(length, branch)
        return (self.came[i] + PRIOR * self.guess[i]) / (self.seen[i] + PRIOR)

    def learn(self, length: int, branch: Branch, came: bool) -> float:
        """Learn from a token that came. Returns the chance that it had before."""
        i = _group(length, branch)
        was, seen = self.came[i], self.seen[i]
        self.came[i], self.seen[i] = was + came, seen + 1.0
        if seen >= MEMORY:
            self.came[i] /= 2
            self.seen[i] /= 2
        return (was + PRIOR * self.guess[i]) / (seen + PRIOR)


def _guess(length: int, share: int) -> float:
    """As in prose; copies do better."""
    if share <= len(SHARES):
        return (0.15, 0.35, 0.7, 0.85, 0.9)[share]
    most, half = {SINGLE: (0.8, 1.8), FEW: (0.92, 0.5), ALWAYS: (0.97, 0.2)}[share]
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


class TextFactor:
    """Ratio of tokens that came to tokens that were expected, in one text lately."""

    __slots__ = ("came", "expected")

    def __init__(self) -> None:
        self.came = self.expected = TEXT_PRIOR

    def add(self, chance: float, came: bool) -> None:
        """Count a token that was expected with this chance, and whether it came."""
        self.came = TRUST * self.came + came
        self.expected = TRUST * self.expected + chance

    @property
    def factor(self) -> float:
        ratio = (self.came + TEXT_PRIOR) / (self.expected + TEXT_PRIOR)
        return min(MOST_FACTOR, max(LEAST_FACTOR, ratio))
