"""A budget of reasoning: its forced tokens and their positions, for any spelling of the marks and any drafts."""

from __future__ import annotations

import random

import pytest

from pyspec.request import ThinkBudget
from pyspec.sample.budget import BudgetRule

PIECES = ["a", "<think>", "</think>", "<th", "ink>", "</", "think>x", "é", "\udcc3", "\udca9", " the"]


def token_bytes(token: int) -> bytes:
    return PIECES[token].encode("utf-8", "surrogateescape")


def rule(n: int, *, is_open: bool = True, forced: tuple[int, ...] = (4, 2)) -> BudgetRule:
    return BudgetRule(
        ThinkBudget(n_tokens=n, start="<think>", end="</think>", is_open=is_open, forced=forced),
        token_bytes,
    )


def text_of(budget: BudgetRule, wanted: list[int]) -> list[int]:
    """The text of a request that would choose `wanted`."""
    out = []
    for token in wanted:
        found = budget.forced(())
        out.append(token if found is None else found[1])
        budget.commit(out[-1:])
    return out


def test_forced_tokens_come_behind_the_budget_and_once() -> None:
    assert text_of(rule(3), [0] * 8) == [0, 0, 0, 4, 2, 0, 0, 0]
    assert text_of(rule(0), [0] * 4) == [4, 2, 0, 0]
    assert text_of(rule(9), [0] * 4) == [0] * 4


@pytest.mark.parametrize("end", [[2], [5, 6], [0, 2]])
def test_reasoning_that_ends_by_itself_is_left_alone(end: list[int]) -> None:
    assert text_of(rule(3), [0, *end, 0, 0, 0, 0]) == [0, *end, 0, 0, 0, 0]


@pytest.mark.parametrize("start", [[1], [3, 4], [0, 1]])
def test_counting_begins_where_reasoning_does(start: list[int]) -> None:
    assert text_of(rule(2, is_open=False), [*start, 0, 0, 0, 0, 0]) == [*start, 0, 0, 4, 2, 0]
    assert text_of(rule(2, is_open=False), [0] * 9) == [0] * 9


def test_no_character_is_cut_in_two() -> None:
    assert text_of(rule(1), [8, 9, 0, 0, 0]) == [8, 9, 4, 2, 0]


def test_what_is_forced_does_not_depend_on_drafts() -> None:
    rng = random.Random(5)
    for _ in range(300):
        n, is_open = rng.randrange(6), rng.random() < 0.5
        wanted = [rng.choice([0, 0, 7, 8, 9, *range(len(PIECES))]) for _ in range(16)]
        want, budget = text_of(rule(n, is_open=is_open), wanted), rule(n, is_open=is_open)
        said = list[int]()
        while len(said) < len(want):
            drafts = [
                t if rng.random() < 0.8 else 0 for t in want[len(said) : len(said) + rng.randrange(5)]
            ]
            chosen, found = [*wanted[len(said) : len(said) + len(drafts)], 10], budget.forced(drafts)
            chosen = [want[len(said) + i] if i < len(drafts) else t for i, t in enumerate(chosen)]
            n_kept = next((i for i, t in enumerate(drafts) if t != chosen[i]), len(drafts))
            if found is not None and found[0] <= n_kept:
                row, token = found
                kept = [*drafts[:row], token]
            else:
                kept = [*drafts[:n_kept], *(want[len(said) + n_kept : len(said) + n_kept + 1])]
            said += kept
            budget.commit(kept)
        assert said[: len(want)] == want


def test_it_is_far_only_where_nothing_can_be_forced_soon() -> None:
    assert not rule(5).is_far and rule(5000).is_far
    budget = rule(0, forced=(2,))
    budget.commit([2])
    assert budget.is_far, "it is over"
