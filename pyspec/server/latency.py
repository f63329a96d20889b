"""Clients' waiting times as histograms: first token, gaps between tokens, queue and whole request, also under vLLM's names.

Events are timed where they leave the engine, so a client that reads slowly does not lengthen these times.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from pyspec.request import Delta, Done, Event, Finish, Started

# fmt: off
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
BETWEEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0)
ALL = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 3600.0)
# fmt: on
HISTOGRAMS = {
    "time_to_first_token_seconds": (FIRST, "from a request's arrival to its first token"),
    "inter_token_latency_seconds": (BETWEEN, "between tokens; the tokens of one round share its time"),
    "request_queue_time_seconds": (ALL, "from a request's arrival to its slot"),
    "request_prefill_time_seconds": (ALL, "from a request's slot to its first token"),
    "request_decode_time_seconds": (ALL, "from a request's first token to its end"),
    "e2e_request_latency_seconds": (ALL, "from a request's arrival to its end"),
}
"""vLLM's names without their prefix. The buckets are vLLM's, with finer ones where drafts make tokens come faster."""


class Histogram:
    """Counts by upper bound, in seconds. Written by one thread. prometheus_client's own takes a lock and a walk over all bounds for each
    token, and tells when each was created."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, n: int = 1) -> None:
        """Count `n` events of this time."""
        self._counts[bisect_left(self._bounds, seconds)] += n
        self._sum += seconds * n

    def metric(self, name: str, about: str) -> Metric:
        """The Prometheus form: each bucket includes the counts of the buckets below it."""
        tops = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(tops, map(float, accumulate(self._counts)), strict=True))
        return HistogramMetricFamily(name, about, buckets=buckets, sum_value=self._sum)


class Latencies:
    """The histograms of one server, and the counts of finish reasons."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self.finishes: dict[Finish, int] = {"eos": 0, "stop": 0, "length": 0}

    def request(self) -> RequestTimes:
        """The times of a request that arrives now."""
        return RequestTimes(self)

    def metrics(self) -> Iterator[Metric]:
        """All metrics, under native and vLLM's names."""
        for name, (_, about) in HISTOGRAMS.items():
            for prefix in ("pyspec_", "vllm:"):
                yield self.histograms[name].metric(prefix + name, about)
        about = "requests that ended well"
        ended = CounterMetricFamily("vllm:request_success", about, labels=["finished_reason"])
        for reason, finishes in (("stop", ("eos", "stop")), ("length", ("length",))):
            n_ended = sum(n for finish, n in self.finishes.items() if finish in finishes)
            ended.add_metric([reason], n_ended)
        yield ended


class RequestTimes:
    """Times of one request: arrival, start and latest event. If a replaced engine starts it again, the first start counts."""

    __slots__ = ("_all", "_arrived", "_first", "_last", "_started")

    def __init__(self, latencies: Latencies) -> None:
        self._all = latencies
        self._arrived = latencies.clock()
        self._started = self._first = self._last = 0.0

    def observe(self, event: Event) -> None:
        """Time an event."""
        if isinstance(event, Delta):
            if event.tokens:
                self._observe_tokens(len(event.tokens))
        elif isinstance(event, Started):
            if not self._started:
                self._started = self._all.clock()
                self._count("request_queue_time_seconds", self._started - self._arrived)
        elif isinstance(event, Done):
            self._observe_end(event)

    def _observe_tokens(self, n: int) -> None:
        now = self._all.clock()
        if self._last:
            self._count("inter_token_latency_seconds", (now - self._last) / n, n)
        else:
            self._first = now
            self._count("time_to_first_token_seconds", now - self._arrived)
            self._count("request_prefill_time_seconds", now - (self._started or self._arrived))
        self._last = now

    def _observe_end(self, event: Done) -> None:
        if event.finish not in self._all.finishes:  # cancelled, or failed
            return
        self._all.finishes[event.finish] += 1
        now = self._all.clock()
        self._count("e2e_request_latency_seconds", now - self._arrived)
        if self._first:
            self._count("request_decode_time_seconds", now - self._first)

    def _count(self, name: str, seconds: float, n: int = 1) -> None:
        self._all.histograms[name].observe(seconds, n)
