"""Whether cuts pay (`CutTrial`)."""

from __future__ import annotations

from pyspec.engine.policy.cut_trial import LONGEST_REST, MARGIN, N_TRIAL, REST, CutTrial


def rounds(trial: CutTrial, first: int, n: int, gain_ms: float) -> int:
    """Run so many rounds in which a cut takes a millisecond. The number of cut ones."""
    n_cut = 0
    for i in range(first, first + n):
        if trial.is_on(i):
            trial.add(i, gain_ms, 1.0)
            n_cut += 1
    return n_cut


def test_cuts_that_pay_go_on() -> None:
    assert rounds(CutTrial(), 0, 1000, MARGIN + 0.1) == 1000


def test_cuts_that_do_not_pay_rest_for_longer_and_longer() -> None:
    trial = CutTrial()
    assert rounds(trial, 0, N_TRIAL + REST - 1, MARGIN - 0.1) == N_TRIAL
    n_cut = rounds(trial, N_TRIAL + REST - 1, 100_000, MARGIN - 0.1)
    assert 0 < n_cut < 100_000 * N_TRIAL / REST / 4 and trial.rest == LONGEST_REST


def test_a_good_verdict_shortens_the_next_rest() -> None:
    trial = CutTrial()
    rounds(trial, 0, 5000, 0.0)
    assert trial.rest > REST
    rounds(trial, trial.rests_until, N_TRIAL, 9.0)
    assert trial.rest == REST
