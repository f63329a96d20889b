"""Rows recorded late, while their slot's state is not written: the same texts, and requests leave the same states."""

from __future__ import annotations

from collections import Counter

import pytest
import test_fly_ahead as ahead
import test_same_text_models as same
from engine_rig import FIXTURES
from test_fly_ahead import flown  # noqa: F401 - a fixture

from pyspec.device.worker import Launched, Worker
from pyspec.engine.loop.pending_round import PendingRound
from pyspec.engine.plan import describe
from pyspec.slots.batch import Batch
from pyspec.slots.round import LogitsNeed

QWEN35, NEMOTRON = FIXTURES / "qwen35.gguf", FIXTURES / "nemotron_latent.gguf"
HYBRIDS = pytest.mark.parametrize("path", [QWEN35, NEMOTRON], ids=["gdn", "mamba2"])
N_LATE = 3


@pytest.fixture(autouse=True)
def waited(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Record rows late on a CPU, too. Counts them by the number of records before."""
    found: Counter[int] = Counter()
    monkeypatch.setattr(describe, "late_rows", lambda _device: N_LATE)
    send = Worker._send

    def watch(self: Worker, batch: Batch, reads: LogitsNeed) -> Launched:
        found.update(seq.n_fold for seq in batch.seqs if seq.late)
        return send(self, batch, reads)

    monkeypatch.setattr(Worker, "_send", watch)
    return found


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ["none", "mtp", pytest.param("fickle-hybrid", marks=pytest.mark.slow)])
def test_same_text_with_staggered_joins(kind: str, waited: Counter[int]) -> None:
    same.test_same_text_with_staggered_joins(kind, 3)
    assert kind != "none" or (set(waited) == {0, 1, 2} and min(waited.values()) > 20)


@pytest.mark.parametrize("np", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_same_text_of_rounds_ahead(np: int, flown: list[PendingRound], waited: Counter[int]) -> None:  # noqa: F811
    ahead.test_same_text_with_staggered_joins("none", np, flown)
    assert set(waited) == {0, 1, 2}


@pytest.mark.slow
@HYBRIDS
def test_requests_that_end_leave_their_state(
    path: object,
    flown: list[PendingRound],  # noqa: F811
    waited: Counter[int],
) -> None:
    """By a token that the device knows, and by one that only the host knows."""
    ahead.test_what_an_end_token_ends_is_gone_on_from(path, False, flown)  # type: ignore[arg-type]
    ahead.test_what_a_request_leaves_is_gone_on_from(path, flown)  # type: ignore[arg-type]
    assert set(waited) == {0, 1, 2}


@pytest.mark.sampled(most=1)
@HYBRIDS
def test_a_token_that_the_host_refuses_leaves_the_records_before_it(
    path: object,
    flown: list[PendingRound],  # noqa: F811
) -> None:
    ahead.test_banned_tokens_among_drafts_leave_the_text_as_it_is(path, flown)  # type: ignore[arg-type]
    ahead.test_a_banned_best_token_sends_only_its_own_request_back(flown)


@pytest.mark.slow
def test_cancels_at_any_moment_leave_the_others_their_text(flown: list[PendingRound]) -> None:  # noqa: F811
    ahead.test_cancels_at_any_moment_leave_the_others_their_text(flown)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_drafts_come_and_go(
    kind: str,
    flown: list[PendingRound],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    waited: Counter[int],
) -> None:
    """A verify behind late rows folds them; rows behind a verify are not late, because its number of kept rows is unknown."""
    ahead.test_drafts_are_those_of_rounds_that_wait(kind, True, flown, monkeypatch)
    assert waited
