"""Policies of drafts that stay because a recording says so (tools/replay.py): without each of them it gives less."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tools"))
import replay


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut takes 0.5 ms, as one of 64 slots does on a core of its own; on a busy one it took up to 1, and the policy was worth less."""
    clock = count()
    monkeypatch.setattr(replay.time, "thread_time", lambda: 0.0005 * next(clock))


def rate(name: str, off: str = "") -> float:
    """Tokens a millisecond of a recording, without one policy."""
    found = [r for r in replay.recordings() if r.name == name]
    if not off:
        return replay.play(found, 300)[name][0]
    with replay.offs()[off]:
        return replay.play(found, 300)[name][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "name", "most"),
    [
        ("levels of slots", "27b-mtp mixed after a busy start, 1", 0.95),
        ("certainty and cuts", "27b-dflash 3.0 tokens, 64", 0.985),
        ("credit for information", "27b-mtp low, then code, 32", 0.985),
        ("plain rounds again", "27b-mtp mixed after a busy start, 8", 0.95),
        ("drafts beside prompts", "35b suffix, 16", 0.97),
    ],
)
def test_what_stays_is_worth_its_lines(policy: str, name: str, most: float) -> None:
    assert rate(name, policy) < most * rate(name)


@pytest.mark.slow
@pytest.mark.parametrize(("streams", "least"), [(1, 1.5), (8, 1.3), (16, 1.15)])
def test_recorded_suffix_drafts_pay(streams: int, least: float) -> None:
    name = f"Gemma 270M suffix, {streams}"
    assert rate(name) > least * rate(name, "no drafts")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["27b-dflash 1.05 tokens, 8", "35b-mtp low, 16", "122b-mtp low, 1", "27b-dflash 1.2 tokens, 64"],
)
def test_drafts_that_are_hardly_ever_right_cost_two_percent_at_most(name: str) -> None:
    assert rate(name) > 0.98 * rate(name, "no drafts")
