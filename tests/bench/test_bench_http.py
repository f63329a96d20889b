"""Turns through HTTP: evaluation of the clients' record, and the limit of serving's cost."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
from clockwork import WIDTH, Clockwork

from pyspec.bench import client
from pyspec.bench.measure import Turn, measure
from pyspec.bench.over_http import Clients, Samples, body_of, measure_http, replay
from pyspec.cli.chats import served
from pyspec.errors import PyspecError
from pyspec.request import Metrics

HOW = Turn(mode="plain", turn=0, n_predict=40 * WIDTH, ignore_eos=True)


def chunk(**value: object) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


FINAL = {
    "stop": True,
    "tokens": [],
    "tokens_predicted": 12,
    "tokens_evaluated": 4,
    "timings": {"draft_n": 6, "draft_n_accepted": 3, "n_draft_used": [1, 0, 3], "drafted_per_pos": [3, 3], "odd": 1},
}  # fmt: skip


def test_a_stream_is_read_whole_however_it_was_cut():
    raw = (
        chunk(tokens=[1, 2], content="ab")
        + b": ping\n\n"
        + chunk(tokens=[], content="c")
        + chunk(**FINAL)
    )
    reads = [(float(i), raw[i : i + 7]) for i in range(0, len(raw), 7)]
    stream = client.parse(reads)
    first_end = raw.index(b"\n\n") + 2
    assert stream["events"] == [(float((first_end - 1) // 7 * 7), 2)]
    assert stream["last"]["tokens_predicted"] == 12 and stream["ended"] == reads[-1][0]


def test_a_stream_that_breaks_off_is_an_error():
    assert (
        "without a final object" in client.parse([(1.0, chunk(tokens=[1]))])["last"]["error"]["message"]
    )


def samples(times: list[float]) -> Samples:
    """An engine that does a round of 7 ms verify each second from second 100 on."""
    values = [Metrics(rounds=int(t - 100), verify_ms=7.0 * (t - 100)) for t in times]
    return Samples(Metrics, times, values)


def test_the_clients_record_is_judged_by_the_same_rule():
    streams = [  # as TWO in test_bench_measure.py: 10 tokens in the 2 seconds in which both decode
        {"events": [(102.0, 1), (103.0, 5), (104.0, 3), (105.0, 2), (106.0, 1)], "ended": 106.0, "last": FINAL},
        {"events": [(103.01, 1), (104.01, 4), (105.01, 1), (106.01, 4), (111.0, 4)], "ended": 111.0, "last": FINAL},
    ]  # fmt: skip
    watch = replay({"began": 100.0, "streams": streams}, samples([100.0, 104.0, 112.0]))
    assert watch.error is None
    assert watch.window == (10, pytest.approx(2.0))
    assert watch.opened is not None and watch.closed is not None
    assert [(m.rounds, round(m.verify_ms)) for _, m in (watch.opened, watch.closed)] == [
        (4, 28),
        (6, 42),
    ]
    assert watch.done[0].timings.n_rounds == 4 and watch.done[0].timings.drafted_per_pos == (3, 3)


def test_what_a_client_was_refused_fails_the_turn():
    refused = {"events": [], "ended": 101.0, "last": {"error": {"message": "status 503: busy"}}}
    watch = replay({"began": 100.0, "streams": [refused]}, samples([100.0, 102.0]))
    assert isinstance(watch.error, PyspecError) and "stream 0: status 503: busy" in str(watch.error)


def test_plain_and_speculative_turns_ask_for_the_same():
    plain, spec = (
        body_of((1, 2), Turn(mode=m, turn=3, n_predict=8, ignore_eos=True)) for m in ("plain", "spec")
    )
    assert plain == spec | {"speculative": False}
    assert (spec["prompt"], spec["seed"], spec["cache_prompt"], spec["stream"]) == (
        [1, 2],
        4,
        False,
        True,
    )


@pytest.fixture
def engine() -> Iterator[Clockwork]:
    made = Clockwork(8, host_ms=1.0, device_ms=5.0)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("n_stream", [1, 8])
def test_serving_costs_a_round_little(engine: Clockwork, n_stream: int):
    """The bound is wide: test machines are shared. tools/bench_server.py measures."""
    prompts = [(1, 2, 3)] * n_stream
    before = sys.getswitchinterval()
    ratios = []
    with served(engine) as port, Clients(port) as clients:
        assert sys.getswitchinterval() <= 1e-4
        for _ in range(3):
            direct = measure(engine.submit, engine.cancel, engine.metrics, prompts, HOW)
            through = measure_http(clients, engine.metrics, prompts, HOW)
            assert (through.via, through.n_predicted) == ("http", direct.n_predicted)
            ratios.append(through.rate / direct.rate)
    assert sys.getswitchinterval() == pytest.approx(before)
    assert max(ratios) > 0.6, ratios


def test_a_round_wakes_the_server_once(monkeypatch: pytest.MonkeyPatch):
    """Eight streams' tokens cost the engine's thread one system call, not eight, if it hands them over while it waits."""
    from pyspec.server import bridge

    wakes: list[int] = []
    real = bridge.Post.announce

    def announce(self: bridge.Post, inbox: bridge.Inbox) -> None:
        wakes.append(not self._is_awake)
        real(self, inbox)

    def share() -> float:
        """Share of announcements that woke the loop; 1 if announcements to an awake loop wake it, too."""
        wakes.clear()
        engine = Clockwork(8, host_ms=1.0, device_ms=5.0, is_deferring=True)
        with served(engine) as port, Clients(port) as clients:
            measure_http(clients, engine.metrics, [(1, 2, 3)] * 8, HOW)
        engine.close()
        assert len(wakes) > 100
        return sum(wakes) / len(wakes)

    monkeypatch.setattr(bridge.Post, "announce", announce)
    # 0.15 on a quiet machine; on a busy one it is asleep again between two tokens now and then, so the best of a few counts
    assert any(share() < 0.6 for _ in range(5))


def test_a_client_that_dies_is_told_of():
    with Clients(1) as clients:
        clients._process.kill()
        with pytest.raises(PyspecError, match="the benchmark's client"):
            clients.start([]).result(10)


def test_a_port_that_nobody_serves_fails_the_turn():
    with Clients(1) as clients, pytest.raises(PyspecError, match="ConnectionRefusedError"):
        measure_http(clients, Metrics, [(1,)], HOW)


def test_interpolated_counters_never_run_backwards():
    s = samples([100.0, 103.0, 103.0, 110.0])
    values = [s.at(t / 4).verify_ms for t in range(4 * 98, 4 * 112)]
    assert all(a <= b for a, b in pairwise(values)) and values[0] == 0.0 and values[-1] == 70.0
