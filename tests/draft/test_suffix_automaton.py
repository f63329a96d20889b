"""The suffix automaton (pyspec/cpu/native/suffix_automaton.h) beside a search through the whole text."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspec.draft.suffix_native import NativeAutomaton, compiled

Texts = list[list[int]]
COUNTED = 16  # states of a token, the longest first, whose places are counted
MOST_FOLLOWERS = 64  # a state with more is not searched for its likeliest
lib = compiled()
pytestmark = pytest.mark.skipif(isinstance(lib, str), reason=str(lib))


class Branch(NamedTuple):
    """The likeliest token behind a substring, the state behind it, and its places among those of all followers."""

    token: int
    state: int
    n: int
    n_all: int


class SuffixAutomaton(NativeAutomaton):
    """With the library's functions for single states."""

    def __init__(self) -> None:
        assert not isinstance(lib, str)
        super().__init__(lib)

    def _call(self, name: str, *arguments: object) -> int:
        return getattr(self._lib, f"pyspec_suffix_{name}")(self.handle, *arguments)

    def _numbers(self, name: str, argument: int, given: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        found = array("i", given)
        there = self._call(name, argument, found.buffer_info()[0])
        return there, tuple(found)

    @property
    def match(self) -> int:
        """State of the longest suffix of the present text that also stands elsewhere."""
        return self._call("match")

    @property
    def n_state(self) -> int:
        return self._call("n_state")

    def length(self, state: int) -> int:
        return self._numbers("state", state, (0,) * 4)[1][0]

    def places(self, state: int) -> int:
        return self._numbers("state", state, (0,) * 4)[1][2]

    def next(self, state: int, token: int) -> int:
        return self._call("next", state, token)

    def likeliest(self, state: int) -> Branch | None:
        there, found = self._numbers("likeliest", state, (0,) * 4)
        return Branch(*found) if there else None

    def step(self, state: int, n: int, token: int) -> tuple[int, ...]:
        return self._numbers("step", token, (state, n))[1]


def of(*texts: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.begin()
        automaton.extend(text)
    return automaton


def count(texts: Texts, part: list[int]) -> int:
    """Places of `part` in all texts."""
    n = len(part)
    return sum(text[i : i + n] == part for text in texts for i in range(len(text) - n + 1))


def followers(texts: Texts, part: list[int]) -> Counter[int]:
    """The tokens behind `part`, and how often each stands there."""
    n = len(part)
    return Counter(
        text[i + n] for text in texts for i in range(len(text) - n) if text[i : i + n] == part
    )


def repeated(text: list[int]) -> int:
    """Length of the longest suffix that also stands further left."""
    return next((n for n in range(len(text) - 1, 0, -1) if count([text], text[len(text) - n :]) > 1), 0)


def state_of(automaton: SuffixAutomaton, part: list[int]) -> int:
    state = 0
    for token in part:
        state = automaton.next(state, token)
        if state < 0:
            return -1
    return state


few = st.lists(st.integers(0, 2), max_size=40)
some = st.lists(st.integers(0, 9), max_size=40)


@settings(max_examples=300, deadline=None)
@given(st.lists(few | some, min_size=1, max_size=3), few)
def test_it_knows_every_part_of_its_texts_and_no_other(texts: Texts, other: list[int]) -> None:
    automaton = of(*texts)
    for text in texts:
        for i in range(len(text)):
            assert state_of(automaton, text[i : i + 6]) > 0
    assert (state_of(automaton, other) >= 0) == (not other or count(texts, other) > 0)


@settings(max_examples=300, deadline=None)
@given(few | some)
def test_its_match_is_the_longest_suffix_that_stands_further_left(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for i, token in enumerate(text):
        automaton.extend([token])
        assert automaton.length(automaton.match) == repeated(text[: i + 1])


@settings(max_examples=300, deadline=None)
@given(st.lists(few | some, min_size=1, max_size=3), st.integers(1, 5))
def test_the_likeliest_follower_has_most_places(texts: Texts, n: int) -> None:
    """Of short texts no token has more states than are counted, so numbers are exact."""
    texts = [text[: COUNTED - 1] for text in texts]
    automaton = of(*texts)
    for text in texts:
        for i in range(len(text)):
            part = text[i : i + n]
            expected, state = followers(texts, part), state_of(automaton, part)
            found = automaton.likeliest(state)
            if found is None:
                assert not expected
                continue
            assert found.n == expected[found.token] == max(expected.values())
            assert found.n_all == sum(expected.values())
            assert found.state == state_of(automaton, [*part, found.token])


@settings(max_examples=200, deadline=None)
@given(few, few, st.integers(0, 40))
def test_a_text_from_outside_is_followed_while_the_automaton_grows(
    text: list[int], other: list[int], cut: int
) -> None:
    """states that are split meanwhile are found again"""
    automaton, state, n = of(text[:cut]), 0, 0
    known = text[:cut]
    for i, token in enumerate(other):
        state, n = automaton.step(state, n, token)
        suffixes = (k for k in range(i + 1, 0, -1) if count([known], other[i + 1 - k : i + 1]))
        assert n == next(suffixes, 0) or len(known) > cut, (
            "it has grown, so a longer suffix may stand there now"
        )
        assert n == 0 or count([known], other[i + 1 - n : i + 1])
        piece = text[len(known) : len(known) + 1]
        automaton.extend(piece)
        known += piece


@pytest.mark.parametrize(
    "text",
    [
        [7] * 5000,
        [1, 2] * 2500,
        list(range(5000)),
        [i % 71 for i in range(5000)],
        [0] * 2500 + [1] * 2500,
    ],
    ids=["one token", "two tokens", "all differ", "period 71", "two runs"],
)
def test_hard_texts_take_linear_memory(text: list[int]) -> None:
    automaton = of(text)
    assert automaton.n_state <= 2 * len(text)
    assert automaton.n_token == len(text) and 32 * len(text) <= automaton.n_bytes <= 150 * len(text)


def test_numbers_of_a_run_stay_bounded() -> None:
    """Short substrings of a run have more places than are counted: at most COUNTED states of a token are."""
    automaton = of([7] * 100)
    assert automaton.places(state_of(automaton, [7] * 95)) == 6
    assert automaton.places(state_of(automaton, [7])) == COUNTED


def test_a_state_with_many_followers_has_no_likeliest() -> None:
    text = [t for i in range(MOST_FOLLOWERS + 1) for t in (1, 2, 100 + i)]
    automaton = of(text)
    assert automaton.likeliest(state_of(automaton, [1, 2])) is None
    assert automaton.likeliest(state_of(automaton, [1])) is not None


def test_of_equally_frequent_followers_the_latest_is_taken() -> None:
    automaton = of([1, 2, 3, 1, 2, 4, 1, 2])
    found = automaton.likeliest(automaton.match)
    assert found is not None and found.token == 4


def test_no_part_crosses_the_border_of_two_texts() -> None:
    automaton = of([1, 2, 3], [4, 5, 6])
    assert state_of(automaton, [3, 4]) == -1 and state_of(automaton, [4, 5, 6]) > 0


def test_the_same_text_again_needs_no_memory() -> None:
    text = random.Random(1).choices(range(50), k=400)
    automaton = of(text)
    before = automaton.n_state
    automaton.begin()
    automaton.extend(text)
    assert automaton.n_state == before
    assert automaton.places(state_of(automaton, text[-5:])) == 2
