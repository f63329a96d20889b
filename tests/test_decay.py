"""Drafts that are right less often behind some length of a text: the alarm, the windows that are tried, and the reason."""

from __future__ import annotations

import random

import pytest

from pyspec.engine.policy.decay import N_LOW, N_RECENT, Decay


def run(
    decay: Decay, n: int, at: int, chance: dict[int, float], seed: int = 0, n_draft: int = 4
) -> list[int]:
    """Windows of n rounds from position `at`, whose drafts are right with the chance of their window."""
    rng, seen = random.Random(seed), []
    for i in range(n):
        window = decay.window(0, at + i)
        seen.append(window)
        right = next((k for k in range(n_draft) if rng.random() >= chance.get(window, 0.0)), n_draft)
        decay.add(0, at + i, n_draft, right)
    return seen


def test_a_text_that_stays_as_it_is_raises_no_alarm() -> None:
    for chance in (0.2, 0.5, 0.8):
        decay = Decay(1)
        assert set(run(decay, 1500, 4096, {0: chance})) == {0} and not decay.reason(0)


@pytest.mark.parametrize("best", [2048, 512, 128])
def test_drafts_that_fall_in_a_long_text_find_the_window_that_mends_them(best: int) -> None:
    decay = Decay(1)
    run(decay, 200, 3900, {0: 0.85})
    after = {0: 0.15, 2048: 0.15, 512: 0.15, 128: 0.15, best: 0.85}
    seen = run(decay, 400, 4200, after)
    assert seen[-1] == best and seen[:N_LOW] == [0] * N_LOW
    assert decay.reason(0).startswith("alarm at 42") and f"{best} were best" in decay.reason(0)


def test_where_no_window_helps_the_drafts_see_all_again_and_alarms_become_rare() -> None:
    decay = Decay(1)
    run(decay, 200, 3900, {0: 0.85})
    bad = {0: 0.2, 2048: 0.1, 512: 0.1, 128: 0.1}
    seen = run(decay, 1000, 4200, bad)
    assert seen[-1] == 0 and sum(w != 0 for w in seen) < 10 * N_RECENT


def test_rounds_without_drafts_count_once_drafts_are_bad() -> None:
    """The controller stops drafting for a slot whose drafts fail, which must not keep the alarm from it."""
    decay = Decay(1)
    run(decay, 200, 3900, {0: 0.85})
    run(decay, N_RECENT, 4200, {0: 0.0})
    assert decay.window(0, 4300) == 0
    changed = [decay.add(0, 4300 + i, 0, 0) for i in range(N_LOW + 1)]
    assert any(changed) and decay.window(0, 4400) == 2048
    for i in range(300):  # nor a trial from its end
        decay.add(0, 4400 + i, 0, 0)
    assert decay.window(0, 4700) == 0 or decay.texts[0].is_own


def test_a_short_text_has_no_windows_to_try() -> None:
    decay = Decay(1)
    run(decay, 150, 10, {0: 0.85})
    assert set(run(decay, 80, 160, {0: 0.1})) == {0}


def test_behind_the_trained_length_drafts_see_that_much() -> None:
    decay = Decay(2, n_trained=2048)
    assert decay.window(0, 2047) == 0 and decay.window(0, 2048) == 1024
    assert "trained length" in decay.reason(0) and not decay.reason(1)
    decay.begin(0)
    assert decay.window(0, 100) == 0 and not decay.reason(0)


def test_a_request_that_begins_long_is_compared_with_short_texts() -> None:
    decay = Decay(1)
    run(decay, 400, 100, {0: 0.85})
    for n_past, best in ((8000, 512), (2100, 0)):
        decay.begin(0, n_past)
        assert run(decay, 200, n_past, {0: 0.15, 512: 0.85})[-1] == best
    decay = Decay(1)  # of short texts nothing is known
    decay.begin(0, 8000)
    assert set(run(decay, 200, 8000, {0: 0.15, 512: 0.85})) == {0}


def test_the_whole_text_is_tried_too_where_the_trained_window_is_bad() -> None:
    decay = Decay(1, n_trained=2048)
    run(decay, 200, 2100, {1024: 0.85})
    seen = run(decay, 400, 2300, {0: 0.85})
    assert seen[-1] == 0 and "all were best" in decay.reason(0)
