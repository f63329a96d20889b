"""How often the likeliest follower of a match came, by the match's length and the follower's share.

Every token of an answer is a verdict, drafted or not: what would have been drafted is compared with what came. So these chances stay
true while nothing is drafted, and learning costs no row.
"""

from __future__ import annotations

from bisect import bisect_left

from pyspec.draft.suffix_automaton import Branch

LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # longest match of each group; longer ones are a group
SHARES = (0.5, 0.75, 0.9, 0.999)  # of a follower that is not the only one
SINGLE, FEW, ALWAYS = (
    len(SHARES) + 1,
    len(SHARES) + 2,
    len(SHARES) + 3,
)  # an only follower, seen once, up to thrice, oftener
N_SHARE = ALWAYS + 1
PRIOR = 6.0  # verdicts that the first guess is worth
MEMORY = 400.0  # verdicts of a group, before older ones count half
MOST_CHANCE = 0.99
TRUST, TEXT_PRIOR = 0.9, 2.0  # of one text: weight of older verdicts, and tokens expected before the first
LEAST_FACTOR, MOST_FACTOR = 0.1, 1.3


def _group(length: int, follower: Branch) -> tuple[int, int]:
    if follower.n < follower.n_all:
        share = bisect_left(SHARES, follower.n / follower.n_all)
    else:
        share = SINGLE if follower.n == 1 else FEW if follower.n <= 3 else ALWAYS
    return bisect_left(LENGTHS, length), share


class SuffixChances:
    """Learned from all texts."""

    def __init__(self) -> None:
        self.came = [[0.0] * N_SHARE for _ in range(len(LENGTHS) + 1)]
        self.seen = [[0.0] * N_SHARE for _ in range(len(LENGTHS) + 1)]
        self.guess = [[_guess(length, share) for share in range(N_SHARE)] for length in (*LENGTHS, 2 * LENGTHS[-1])]

    def of(self, length: int, follower: Branch) -> float:
        """The chance that `follower` comes behind a match of `length` tokens."""
        i, j = _group(length, follower)
        return (self.came[i][j] + PRIOR * self.guess[i][j]) / (self.seen[i][j] + PRIOR)

    def add(self, length: int, follower: Branch, came: bool) -> None:
        """Learn from a token that came."""
        i, j = _group(length, follower)
        self.came[i][j] += came
        self.seen[i][j] += 1.0
        if self.seen[i][j] > MEMORY:
            self.came[i][j] /= 2
            self.seen[i][j] /= 2


def _guess(length: int, share: int) -> float:
    by_length = length / (length + 2.5)
    of_share = (0.25, *SHARES)[share] if share <= len(SHARES) else {SINGLE: 0.9, FEW: 0.95, ALWAYS: 0.98}[share]
    return by_length * of_share


class TextFactor:
    """Ratio of tokens that came to tokens that were expected, in one text lately."""

    __slots__ = ("came", "expected")

    def __init__(self) -> None:
        self.came = self.expected = TEXT_PRIOR

    def add(self, chance: float, came: bool) -> None:
        self.came = TRUST * self.came + came
        self.expected = TRUST * self.expected + chance

    @property
    def factor(self) -> float:
        ratio = (self.came + TEXT_PRIOR) / (self.expected + TEXT_PRIOR)
        return min(MOST_FACTOR, max(LEAST_FACTOR, ratio))
