"""N-grams: the tokens that followed the last ones before."""

from __future__ import annotations

import random

import pytest

from pyspec.draft.ngram import NGram
from pyspec.slots.drafts import DraftRequest, Drafts
from pyspec.slots.table import Slot


def propose(tokens: list[int], n: int = 8, n_match: int = 3) -> list[int]:
    drafter, slot = NGram(8, n_match), Slot(0, tokens=tokens[:-1])
    drafter.begin(slot)
    return list(drafter.draft([DraftRequest(slot, tokens[-1], n)])[0].tokens)


def test_ngrams_propose_what_followed_before() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 1, 2, 3]) == [4, 5, 6, 1, 2, 3, 4, 5]
    assert propose([1, 2, 3, 4, 5, 6, 1, 2, 3], n=2) == [4, 5]
    assert propose([7, 7, 7, 7]) == [7] * 8


def test_the_occurrence_with_the_longer_common_past_wins() -> None:
    assert propose([9, 8, 1, 2, 3, 40, 0, 7, 1, 2, 3, 50, 9, 8, 1, 2, 3], n=1) == [40]
    assert propose([1, 2, 3, 40, 0, 1, 2, 3, 50, 6, 1, 2, 3], n=1) == [50], "of equals the latest"


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6]])
def test_without_an_earlier_occurrence_there_is_no_draft(tokens: list[int]) -> None:
    assert propose(tokens) == []


@pytest.mark.parametrize("n_match", [1, 2, 3, 5])
def test_growing_text_gives_the_drafts_of_a_fresh_index(n_match: int) -> None:
    """The index of a text is extended, never rebuilt: with two kinds of tokens everything repeats."""
    rng = random.Random(n_match)
    tokens = rng.choices([1, 2], k=4)
    drafter, slot = NGram(8, n_match), Slot(1, generation=5)
    drafter.begin(slot)
    for _ in range(60):
        slot.tokens = tokens[:-1]
        assert drafter.draft([DraftRequest(slot, tokens[-1], 8)]) == [
            Drafts(propose(tokens, n_match=n_match))
        ]
        tokens += rng.choices([1, 2], k=rng.randint(1, 4))


def test_a_new_request_does_not_see_the_old_text() -> None:
    drafter, slot = NGram(8, 2), Slot(0, tokens=[1, 2, 3, 1, 2])
    drafter.begin(slot)
    assert drafter.draft([DraftRequest(slot, 3, 4)]) == [Drafts([1, 2, 3, 1])]
    drafter.end(slot)
    slot.tokens, slot.generation = [4, 1, 2], 1
    drafter.begin(slot)
    assert drafter.draft([DraftRequest(slot, 3, 4)]) == [Drafts([])]
