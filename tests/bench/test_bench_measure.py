"""Measurement of a turn, on scripted events: the rounds that count for the rate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from pyspec.bench import measure as m
from pyspec.errors import Unavailable
from pyspec.request import Delta, Done, Event, Failed, Metrics, Request, Timings

Sink = Callable[[Event], None]
Step = tuple[float, int, Event]  # (seconds it takes, stream, event)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Script:
    """An engine that plays `steps` once all streams are there."""

    def __init__(self, clock: Clock, steps: Sequence[Step], n_stream: int) -> None:
        self.clock, self.steps, self.n_stream = clock, steps, n_stream
        self.sinks: list[Sink] = []
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.rounds = 0

    def submit(self, request: Request, sink: Sink) -> str:
        self.requests.append(request)
        self.sinks.append(sink)
        if len(self.sinks) == self.n_stream:
            threading.Thread(target=self.play).start()
        return f"r{len(self.sinks)}"

    def play(self) -> None:
        for seconds, stream, event in self.steps:
            self.clock.now += seconds
            self.rounds += seconds > 0  # the scripts below start a round with each wait
            self.sinks[stream](event)

    def metrics(self) -> Metrics:
        n = self.rounds - 1
        return Metrics(
            rounds=n, verify_ms=7.0 * n, draft_ms=2.0 * n, expert_hits=n**2, expert_misses=11 * n
        )


def delta(n: int) -> Delta:
    return Delta("r", tuple(range(n)), "x" * n)


def done(n: int, timings: Timings | None = None) -> Done:
    return Done(
        "r", "length", 4, n, timings or Timings(predicted_n=n, n_rounds=3, draft_n=6, draft_n_accepted=3)
    )


def run(
    monkeypatch: pytest.MonkeyPatch, steps: Sequence[Step], n_stream: int, mode: m.Mode = "spec"
) -> m.Run:
    clock = Clock()
    monkeypatch.setattr(m, "time", clock)
    script = Script(clock, steps, n_stream)
    prompts = [(1, 2, 3, 4)] * n_stream
    return m.measure(
        script.submit,
        script.cancelled.append,
        script.metrics,
        prompts,
        m.Turn(mode=mode, turn=0, n_predict=16, ignore_eos=False),
    )


TWO = [
    (2.0, 0, delta(1)),  # stream 0 begins alone: prompt of stream 1 still runs
    (1.0, 0, delta(5)),
    (0.0, 1, delta(1)),  # stream 1 begins: the window opens after this round
    (1.0, 0, delta(3)),
    (0.0, 1, delta(4)),
    (1.0, 0, delta(2)),
    (0.0, 1, delta(1)),
    (1.0, 0, delta(1)),  # the round in which stream 0 ends is left out: it may have been cut
    (0.0, 0, done(12)),
    (0.0, 1, delta(4)),
    (5.0, 1, delta(4)),  # alone again
    (0.0, 1, done(14)),
]


def test_a_rate_counts_only_rounds_in_which_all_streams_decode(monkeypatch: pytest.MonkeyPatch):
    r = run(monkeypatch, TWO, 2)
    assert (r.window_n, r.window_s, r.rate) == (10, 2.0, 5.0)
    assert r.prompt_rate == pytest.approx(8 / 3)
    assert r.total_rate == pytest.approx(26 / 11)


def test_milliseconds_are_those_of_a_round_in_the_window(monkeypatch: pytest.MonkeyPatch):
    r = run(monkeypatch, TWO, 2)
    assert r.rounds == 2
    assert r.round_ms == pytest.approx(1000.0)
    assert r.ms == {"draft": 2.0, "verify": 7.0, "sample": 0.0, "host": 0.0}


def test_hits_are_those_of_the_windows_rounds(monkeypatch: pytest.MonkeyPatch):
    r = run(monkeypatch, TWO, 2)
    assert r.hit_rate == pytest.approx(12 / (12 + 22))  # of rounds 3 and 4: 4**2 - 2**2 and 2 * 11
    assert r.result_text.endswith(", 35% of experts on the GPU")
    assert "experts" not in replace(r, hit_rate=0.0).result_text


def test_no_round_with_all_streams_gives_no_rate_instead_of_a_wrong_one(monkeypatch: pytest.MonkeyPatch):
    steps = [(1.0, 0, delta(1)), (0.0, 0, done(1)), (1.0, 1, delta(1)), (0.0, 1, done(1))]
    r = run(monkeypatch, steps, 2)
    assert (r.rate, r.window_n, r.rounds) == (0.0, 0, 0)


def test_acceptance_of_all_streams_is_added_up(monkeypatch: pytest.MonkeyPatch):
    a = Timings(
        n_rounds=4, draft_n=8, draft_n_accepted=6, drafted_per_pos=(4, 4), accepted_per_pos=(4, 2)
    )
    b = Timings(
        n_rounds=2,
        draft_n=1,
        draft_n_accepted=0,
        drafted_per_pos=(1,),
        accepted_per_pos=(0,),
        synthetic=True,
    )
    r = run(
        monkeypatch,
        [(1.0, 0, delta(9)), (0.0, 0, done(9, a)), (1.0, 1, delta(2)), (0.0, 1, done(2, b))],
        2,
    )
    assert (r.drafted, r.accepted) == ((5, 4), (4, 2))
    assert r.mean_len == 2.0
    assert r.synthetic


@pytest.mark.parametrize(("mode", "limit"), [("plain", 0), ("spec", None)])
def test_plain_turns_ask_for_no_drafts_and_no_turn_reuses_a_prompt(
    monkeypatch: pytest.MonkeyPatch, mode: m.Mode, limit: int | None
):
    clock = Clock()
    monkeypatch.setattr(m, "time", clock)
    script = Script(clock, [(1.0, 0, delta(1)), (0.0, 0, done(1))], 1)
    how = m.Turn(mode=mode, turn=0, n_predict=4, ignore_eos=True)
    m.measure(script.submit, script.cancelled.append, script.metrics, [(1,)], how)
    request = script.requests[0]
    assert request.n_draft_max == limit
    assert not request.cache_prompt
    assert request.params.greedy and request.params.ignore_eos


def test_a_failed_stream_fails_the_turn_and_the_others_are_cancelled(monkeypatch: pytest.MonkeyPatch):
    steps = [(1.0, 0, Failed("r", Unavailable("gone"))), (0.0, 1, done(0))]
    clock = Clock()
    monkeypatch.setattr(m, "time", clock)
    script = Script(clock, steps, 2)
    with pytest.raises(Unavailable, match="gone"):
        m.measure(
            script.submit,
            script.cancelled.append,
            script.metrics,
            [(1,), (2,)],
            m.Turn(mode="spec", turn=0, n_predict=4, ignore_eos=False),
        )
    assert script.cancelled == ["r1", "r2"]


def test_drafted_lengths_are_kept_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [3] * 120 + [1] * 60 + [0] * 20
    steps = [(1.0, 0, Delta("r", (1,), "x", n_draft=n)) for n in lengths]
    found = run(monkeypatch, [*steps, (0.0, 0, done(200))], 1)
    assert found.all_rounds == 200 and len(found.lengths) == 100
    assert found.lengths == (3.0,) * 60 + (1.0,) * 30 + (0.0,) * 10
    assert run(monkeypatch, [*steps, (0.0, 0, done(200))], 1, "plain").lengths == ()
