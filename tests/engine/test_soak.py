"""A short soak: the tool's own checks over some random requests (`tests/long_runs/soak.py --minutes 10` for the long one)."""

from __future__ import annotations

import gc
import os
import random
import sys

import pytest
from engine_rig import ROOT

from pyspec.request import Request

sys.path.insert(0, str(ROOT / "tests" / "long_runs"))
import soak
from soak_memory import MIB, Reading, Watch, accounted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_request", "np", "n_prompt"),
    [(160, 4, 8), pytest.param(500, 8, 24, marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def test_random_traffic_with_cancels_leaks_nothing_and_keeps_every_text(
    n_request: int, np: int, n_prompt: int
) -> None:
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
        kept.append(b"x" * (80 << 20))
        return honest(rng, known)

    monkeypatch.setattr(soak, "random_request", leaks)
    well, line = soak.soak(0, 2, seed=5, n_prompt=4, n_request=60)
    assert not well and "grew by" in line


@pytest.mark.parametrize(
    ("mib", "flaw"),
    [
        ([900, 1200, 1300, 1310, 1290, 1360], ""),  # 4.6 % behind the second minute
        ([900, 1200, 1300, 1310, 1290, 1370], "memory beside checkpoints grew by 70 MiB (5.4%) from 1300 MiB after 2 minutes"),
        ([900, 1200, 1300, 1400, 1300, 1300], "memory beside checkpoints grew by 100 MiB (7.7%) from 1300 MiB after 2 minutes"),
        ([900, 1200, 1300], ""),
    ],
)  # fmt: skip
def test_growth_is_judged_behind_the_first_minutes(mib: list[int], flaw: str) -> None:
    watch = Watch(None, 0, every_s=60.0, warm_s=120.0)  # type: ignore[arg-type]  # nothing is read
    watch.readings += [Reading(60.0 * i, n * MIB, 7, i) for i, n in enumerate(mib)]
    assert watch.flaw() == flaw


class Loop:
    """A reference cycle with some megabytes: unused, but alive until the garbage collector runs."""

    def __init__(self) -> None:
        self.me, self.held = self, bytearray(b"x" * (60 << 20))


def test_memory_that_waits_for_the_collector_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soak once collected and trimmed before it measured, and missed evicted states."""
    monkeypatch.setattr(soak, "accounted", lambda engine: 0)
    gc.collect()
    gc.disable()
    try:
        before = soak.not_cached(None)  # type: ignore[arg-type]
        for _ in range(3):
            Loop()
        after = soak.not_cached(None)  # type: ignore[arg-type]
    finally:
        gc.enable()
    assert after - before > 100 * MIB
    assert "memory grew by 26 MiB" in soak.grown((100 * MIB, 126 * MIB))
    assert soak.grown((100 * MIB, 124 * MIB)) == ""


def test_kept_states_are_told_from_what_grows_beside_them() -> None:
    with soak.Engine.load("demo", draft=None, np=1, ctx=512, warm_up=False, threads=1) as engine:
        engine.generate("Once upon a time " * 9, max_tokens=2)
        assert accounted(engine) == sum(engine.loop.cache.states.n_bytes) > MIB
        assert soak.process_of(engine, False) == os.getpid()


def test_an_idle_engine_with_a_lost_page_is_seen() -> None:
    tally = soak.Tally()
    with soak.Engine.load("demo", draft=None, np=1, warm_up=False) as engine:
        engine.loop.table.slots[0].reserved = 3
        soak.inspect_idle(engine, tally)
    assert "3 pages reserved" in tally.wrong[0]


def test_memory_is_judged_by_what_is_not_accounted_and_by_the_end() -> None:
    def flaw(*readings: tuple[int, int]) -> str:
        watch = Watch(None, 0, 1.0, warm_s=60)  # type: ignore[arg-type]

        watch.readings = [Reading(60 * i, r * MIB, a * MIB, 0) for i, (r, a) in enumerate(readings)]
        return watch.flaw()

    start = [(500, 0), (1000, 400)]
    assert not flaw(*start, *[(1040, 420)] * 6)
    assert not flaw(*start, (1200, 600), *[(1000, 400)] * 5), "checkpoints came and went"
    assert "beside checkpoints grew by 60 MiB" in flaw(*start, (1060, 400), *[(1000, 400)] * 5), (
        "for a moment is enough"
    )
    assert flaw(*start, *[(1100, 500)] * 5).startswith(
        "memory grew by 100 MiB (10.0%) from 1000 MiB after 1 minutes"
    )
    assert not flaw((500, 0)), "nothing is said of a run that was never warm"
