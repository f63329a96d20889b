"""Histograms of waiting times, and the endpoints for routers."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_client import app_of
from server_fakes import FakeEngine
from waiting import Clock

from pyspec.request import Delta, Done, Started, Timings
from pyspec.server.latency import BETWEEN, Latencies


def figures(latencies: Latencies) -> dict[str, float]:
    """count and sum of each of vLLM's names."""
    return {
        sample.name.removeprefix("vllm:") + sample.labels.get("finished_reason", ""): sample.value
        for metric in latencies.metrics()
        for sample in metric.samples
        if sample.name.startswith("vllm:") and "le" not in sample.labels
    }


def test_waits_are_measured_where_they_happen() -> None:
    clock = Clock(100.0)
    latencies = Latencies(clock)
    times = latencies.request()

    def pass_by(seconds: float, event: object) -> None:
        clock.now += seconds
        times.observe(event)  # type: ignore[arg-type]

    pass_by(2.0, Started("r", 0, 5, 0))
    pass_by(0.5, Delta("r", (1,), "a"))
    pass_by(0.3, Delta("r", (1, 2, 3), "bcd"))  # a round that committed three
    pass_by(0.1, Delta("r", (), "e"))  # text that was held back is no token
    pass_by(0.9, Started("r", 1, 5, 0))  # a new engine goes on: no second wait in the queue
    pass_by(0.1, Delta("r", (4,), ""))
    pass_by(1.0, Done("r", "eos", 5, 5, Timings()))
    found = figures(latencies)
    expected = {
        "request_queue_time_seconds": (1, 2.0),
        "time_to_first_token_seconds": (1, 2.5),
        "request_prefill_time_seconds": (1, 0.5),
        "inter_token_latency_seconds": (4, 0.3 + 1.1),
        "request_decode_time_seconds": (1, 2.4),
        "e2e_request_latency_seconds": (1, 4.9),
    }
    for name, (count, total) in expected.items():
        assert found[f"{name}_count"] == count and found[f"{name}_sum"] == pytest.approx(total), name
    assert found["request_success_totalstop"] == 1 and found["request_success_totallength"] == 0


def test_a_cancelled_request_is_no_latency() -> None:
    latencies = Latencies(Clock())
    latencies.request().observe(Done("r", "cancelled", 5, 0, Timings()))
    assert not any(figures(latencies).values())


def test_buckets_count_those_below_them_too() -> None:
    latencies = Latencies(Clock())
    for seconds, n in ((0.004, 3), (0.0051, 2), (1e6, 1)):
        latencies.histograms["inter_token_latency_seconds"].observe(seconds, n)
    metric = next(m for m in latencies.metrics() if m.name == "vllm:inter_token_latency_seconds")
    counts = {s.labels["le"]: s.value for s in metric.samples if "le" in s.labels}
    assert [counts[le] for le in ("0.0025", "0.005", "0.0075", "40.0", "+Inf")] == [0, 3, 5, 5, 6]
    assert len(counts) == len(BETWEEN) + 1


def test_a_scrape_has_the_waits_of_what_was_served(engine: FakeEngine) -> None:
    app = app_of(engine)
    app.post("/completion", {"prompt": "x", "n_predict": 8})
    families = {
        family.name: family for family in text_string_to_metric_families(app.get("/metrics").text)
    }
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "inter_token_latency_seconds",
    ):
        for prefix in ("vllm:", "pyspec_"):
            assert families[prefix + name].type == "histogram"
            count = next(s.value for s in families[prefix + name].samples if s.name.endswith("_count"))
            assert count > 0 if name.startswith("inter") else count == 1


def test_routers_are_answered(engine: FakeEngine) -> None:
    app = app_of(engine)
    assert set(app.get("/version").json()) == {"version"} and app.get("/load").json() == {
        "server_load": 0
    }
    assert app.get("/ping").status_code == app.post("/ping").status_code == 200
    info = app.get("/get_server_info").json()
    assert info["served_model_name"] == "fake-1"
    assert info["max_running_requests"] == 4
    assert info["context_length"] == 512
    assert info["internal_states"] == app.get("/get_load").json()
    assert app.get("/get_model_info").json()["is_generation"] is True


def test_a_probe_needs_no_key_and_the_files_path_does(engine: FakeEngine) -> None:
    app = app_of(engine, api_keys=("k",))
    assert app.get("/ping").status_code == 200 and app.get("/get_server_info").status_code == 401
    engine.is_alive = False
    assert app.get("/ping").status_code == 503
