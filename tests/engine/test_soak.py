"""A short soak: the tool's own checks over some random requests (`tools/soak.py --minutes 10` for the long one)."""

from __future__ import annotations

import random
import sys

import pytest
from engine_rig import ROOT

from pyspec.request import Request

sys.path.insert(0, str(ROOT / "tools"))
import soak


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_request", "np", "n_prompt"),
    [(80, 4, 8), pytest.param(500, 8, 24, marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def test_random_traffic_with_cancels_leaks_nothing_and_keeps_every_text(n_request: int, np: int, n_prompt: int) -> None:
    well, line = soak.soak(0, np, seed=5, n_prompt=n_prompt, n_request=n_request)
    assert well, line
    assert "finished over HTTP" in line and "cancelled" in line and "disconnected" in line


@pytest.mark.slow
def test_the_soak_sees_a_wrong_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that cannot fail proves nothing: one known text is falsified."""
    known = soak.known_texts(1)
    lie = [soak.replace(k, tokens=(*k.tokens[:-1], 1), text=k.text[:-2] + "#!") for k in known]
    monkeypatch.setattr(soak, "known_texts", lambda n: lie)
    well, line = soak.soak(0, 2, seed=5, n_request=400)
    assert not well and line.startswith("FAILED")


@pytest.mark.slow
def test_the_soak_sees_memory_that_is_never_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, honest = [], soak.random_request

    def leaks(rng: random.Random, known: soak.Known) -> Request:
        kept.append(b"x" * (4 << 20))
        return honest(rng, known)

    monkeypatch.setattr(soak, "random_request", leaks)
    well, line = soak.soak(0, 2, seed=5, n_prompt=4, n_request=60)
    assert not well and "memory grew by" in line


def test_an_idle_engine_with_a_lost_page_is_seen() -> None:
    tally = soak.Tally()
    with soak.Engine.load("demo", draft=None, np=1, warm_up=False) as engine:
        engine.loop.table.slots[0].reserved = 3
        soak.inspect_idle(engine, tally)
    assert "3 pages reserved" in tally.wrong[0]
