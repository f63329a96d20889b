"""A suffix automaton over token ids: every substring of its texts, its number of places and its followers.

A state stands for the substrings that end at the same places, and `link` leads to the longest shorter suffix with more places
(Blumer et al., 1985; online construction, amortised O(1) a token). It lies in flat arrays: a state with one follower keeps it there,
one with more has a dict. Times and bytes: tests/draft/test_suffix_automaton.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

NONE, FORK = -1, -2  # in place of the only follower: none, or several
MOST_FOLLOWERS = 64  # a state with more is not searched for its likeliest
COUNTED = 16  # states of a token, the longest first, whose places are counted
STATE_BYTES, FORK_BYTES, BRANCH_BYTES = (
    27,
    250,
    72,
)  # of a state, of the dict of a fork, and of each of its followers


class Branch(NamedTuple):
    """The likeliest token behind a substring, the state behind it, and its places among those of all followers."""

    token: int
    state: int
    n: int
    n_all: int


class SuffixAutomaton:
    """Grows by tokens; forgets nothing.

    length  of the longest substring of each state
    link    of each state; -1 of the root
    places  of each state: how often its substrings stand in the texts. At most COUNTED states of a token count it, so short
            substrings may stand more often
    at      token at which a state was counted last
    last    state of the present text
    """

    __slots__ = (
        "_forks",
        "_n_branch",
        "_only",
        "_to",
        "at",
        "last",
        "length",
        "link",
        "n_token",
        "places",
    )

    def __init__(self) -> None:
        self.length, self.link = array("i", [0]), array("i", [-1])
        self.places, self.at = array("i", [0]), array("i", [0])
        self._only, self._to = array("i", [FORK]), array("i", [0])  # token and state of an only follower
        self._forks: dict[int, dict[int, int]] = {0: {}}
        self._n_branch = 0
        self.last = self.n_token = 0

    @property
    def n_bytes(self) -> int:
        """Host memory, estimated from counts."""
        return (
            STATE_BYTES * len(self.length)
            + FORK_BYTES * len(self._forks)
            + BRANCH_BYTES * self._n_branch
        )

    @property
    def match(self) -> int:
        """State of the longest suffix of the present text that also stands elsewhere."""
        return max(self.link[self.last], 0)

    def begin(self) -> None:
        """Begin another text: no substring crosses its border."""
        self.last = 0

    def next(self, state: int, token: int) -> int:
        """The state behind `token`; -1 if it never followed."""
        only = self._only[state]
        if only == token:
            return self._to[state]
        return self._forks[state].get(token, -1) if only == FORK else -1

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens to the present text."""
        link, places, at = self.link, self.places, self.at
        for token in tokens:
            self.n_token += 1
            self.last = state = self._state_behind(token)
            for _ in range(COUNTED):
                if state <= 0:
                    break
                places[state] += 1
                at[state] = self.n_token
                state = link[state]

    def _state_behind(self, token: int) -> int:
        """The state of the present text with `token`; new unless the whole text stands in another one."""
        before, length = self.last, self.length
        known = self.next(before, token)
        if known >= 0:
            return known if length[known] == length[before] + 1 else self._split(before, token, known)
        new = self._add(length[before] + 1)
        link, only, to, forks = self.link, self._only, self._to, self._forks
        state, known = before, -1
        while state >= 0:
            follower = only[state]
            if follower == FORK:
                followers = forks[state]
                known = followers.get(token, -1)
                if known >= 0:
                    break
                followers[token] = new
                self._n_branch += 1
            elif follower == token:
                known = to[state]
                break
            elif follower == NONE:
                only[state], to[state] = token, new
            else:
                forks[state] = {follower: to[state], token: new}
                only[state] = FORK
                self._n_branch += 2
            state = link[state]
        if state < 0:
            link[new] = 0
        else:
            link[new] = known if length[known] == length[state] + 1 else self._split(state, token, known)
        return new

    def _add(self, length: int) -> int:
        self.length.append(length)
        self.link.append(0)
        self.places.append(0)
        self.at.append(0)
        self._only.append(NONE)
        self._to.append(0)
        return len(self.length) - 1

    def _split(self, state: int, token: int, known: int) -> int:
        """A state of its own for the shorter substrings of `known`, those up to the length of `state` and `token`."""
        new = self._add(self.length[state] + 1)
        link, only, to, forks = self.link, self._only, self._to, self._forks
        self.places[new], self.at[new] = self.places[known], self.at[known]
        only[new], to[new] = only[known], to[known]
        if only[new] == FORK:
            forks[new] = dict(forks[known])
            self._n_branch += len(forks[new])
        link[new] = link[known]
        link[known] = new
        while state >= 0 and self.next(state, token) == known:
            if only[state] == FORK:
                forks[state][token] = new
            else:
                to[state] = new
            state = link[state]
        return new

    def likeliest(self, state: int) -> Branch | None:
        """The follower with most places, of equals the latest; None if there is none, or there are too many."""
        only = self._only[state]
        if only >= 0:
            n = self.places[self._to[state]]
            return Branch(only, self._to[state], n, n)
        followers = self._forks[state] if only == FORK else {}
        if not 0 < len(followers) <= MOST_FOLLOWERS:
            return None
        places, at, best, n_all = self.places, self.at, -1, 0
        likeliest = -1
        for token, behind in followers.items():
            n = places[behind]
            n_all += n
            if best < 0 or (n, at[behind]) > (places[best], at[best]):
                likeliest, best = token, behind
        return Branch(likeliest, best, places[best], n_all)

    def step(self, state: int, n: int, token: int) -> tuple[int, int]:
        """Follow a text from outside. state, n: of its longest suffix that stands here. Returns those behind `token`."""
        link, length = self.link, self.length
        while state and n <= length[link[state]]:  # states are split while the text is followed
            state = link[state]
        behind = self.next(state, token)
        while behind < 0 and state:
            state = link[state]
            n = length[state]
            behind = self.next(state, token)
        return (behind, n + 1) if behind >= 0 else (0, 0)
