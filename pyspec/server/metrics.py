"""`/metrics`: the engine's counters for Prometheus, read only when scraped.

Every figure has a native `pyspec_*` name. Figures that llama-server or vLLM publish also appear under their names, so existing
dashboards keep working.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from pyspec.request import Metrics, SlotInfo
from pyspec.server.latency import Latencies

# (attribute of Metrics, native name, llama-server's, vLLM's, description); "" for a name that the other server does not have
COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "prompt_tokens", "prompt_tokens", "prompt tokens processed"),
    (
        "prompt_tokens_cached",
        "prompt_tokens_cached",
        "prompt_tokens_cached",
        "prefix_cache_hits",
        "prompt tokens taken from the cache",
    ),
    ("prompt_tokens_seen", "prompt_tokens_seen", "", "prefix_cache_queries", "prompt tokens processed or cached"),
    ("prompt_seconds", "prompt_seconds", "prompt_seconds", "", "seconds spent on prompts"),
    ("predicted_tokens", "predicted_tokens", "tokens_predicted", "generation_tokens", "tokens generated"),
    ("predicted_seconds", "predicted_seconds", "tokens_predicted_seconds", "", "seconds spent generating"),
    ("rounds", "rounds", "n_decode", "", "target forwards"),
    ("requests_done", "requests_done", "", "", "requests that ended well"),
    ("requests_cancelled", "requests_cancelled", "", "", "requests cancelled"),
    ("requests_failed", "requests_failed", "", "", "requests that failed"),
    ("drafts", "drafts", "spec_decode_num_drafts", "spec_decode_num_drafts", "drafts verified"),
    (
        "draft_tokens",
        "draft_tokens",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_draft_tokens",
        "drafted tokens verified",
    ),
    (
        "accepted_tokens",
        "accepted_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens",
        "drafted tokens accepted",
    ),
    ("guard_trips", "guard_trips", "", "", "indices a kernel refused"),
    ("restarts", "engine_restarts", "", "", "times the engine's process was replaced"),
    ("tokens_replayed", "tokens_replayed", "", "", "tokens that went through the model again after that"),
    ("draft_ms", "draft_milliseconds", "", "", "milliseconds spent drafting"),
    ("verify_ms", "verify_milliseconds", "", "", "milliseconds spent verifying"),
    ("sample_ms", "sample_milliseconds", "", "", "milliseconds spent sampling"),
    ("host_ms", "host_milliseconds", "", "", "milliseconds spent between launches"),
)
GAUGES = (
    ("requests_processing", "requests_processing", "requests_processing", "num_requests_running", "requests in slots"),
    ("requests_queued", "requests_queued", "requests_deferred", "num_requests_waiting", "requests that wait"),
    ("n_tokens_max", "n_tokens_max", "n_tokens_max", "", "largest context seen"),
    ("pages_used", "pages_used", "", "", "cache pages in use"),
    ("pages_total", "pages_total", "", "", "cache pages there are"),
    ("pages_cached", "pages_cached", "", "", "cache pages filed for later requests"),
    ("states", "checkpoints", "", "", "recurrent checkpoints kept"),
    ("states_device_bytes", "checkpoint_device_bytes", "", "", "bytes of checkpoints on the device"),
    ("states_host_bytes", "checkpoint_host_bytes", "", "", "bytes of checkpoints in host memory"),
    ("seconds_since_step", "step_age_seconds", "", "", "age of the last round while busy"),
)
PER_POSITION = (
    ("drafted_per_pos", "draft_tokens_per_pos", "", "", "drafted tokens verified, by position in the draft"),
    (
        "accepted_per_pos",
        "accepted_tokens_per_pos",
        "spec_decode_num_accepted_tokens_per_pos",
        "spec_decode_num_accepted_tokens_per_pos",
        "drafted tokens accepted, by position in the draft",
    ),
)

PEAK = b"# TYPE llamacpp:n_tokens_max %s\n"
"""llama-server exports it as a counter because it never falls."""


class EngineCollector(Collector):
    """Reads the engine once per scrape."""

    def __init__(
        self,
        metrics: Callable[[], Metrics],
        slots: Callable[[], Sequence[SlotInfo]],
        latencies: Latencies,
    ) -> None:
        self._metrics = metrics
        self._slots = slots
        self._latencies = latencies

    def collect(self) -> Iterator[Metric]:
        m = self._metrics()
        for attribute, *names, about in COUNTERS:
            for name in _spellings(names):
                yield CounterMetricFamily(name, about, value=float(getattr(m, attribute)))
        for attribute, *names, about in GAUGES:
            for name in _spellings(names):
                yield Gauge(name, about, value=float(getattr(m, attribute)))
        for attribute, *names, about in PER_POSITION:
            for name in _spellings(names):
                yield _per_position(name, about, getattr(m, attribute))
        yield from self._ratios(m)
        yield from self._per_slot()
        yield from self._latencies.metrics()

    def _ratios(self, m: Metrics) -> Iterator[Metric]:
        """Averages since start; llama-server's figures of these names are averages since its last scrape."""
        prompt = m.prompt_tokens / m.prompt_seconds if m.prompt_seconds else 0.0
        predicted = m.predicted_tokens / m.predicted_seconds if m.predicted_seconds else 0.0
        busy = m.busy_slot_rounds / m.rounds if m.rounds else 0.0
        yield Gauge("llamacpp:prompt_tokens_seconds", "prompt tokens per second since start", prompt)
        yield Gauge("llamacpp:predicted_tokens_seconds", "tokens per second since start", predicted)
        yield Gauge("llamacpp:n_busy_slots_per_decode", "busy slots per target forward", busy)
        rate = m.accepted_tokens / m.draft_tokens if m.draft_tokens else 0.0
        yield Gauge("pyspec_draft_acceptance_rate", "accepted / drafted tokens since start", rate)
        hits = m.prompt_tokens_cached / m.prompt_tokens_seen if m.prompt_tokens_seen else 0.0
        yield Gauge("pyspec_prefix_cache_hit_ratio", "cached / all prompt tokens since start", hits)
        usage = m.pages_used / m.pages_total if m.pages_total else 0.0
        yield Gauge("vllm:kv_cache_usage_perc", "share of cache pages in use, 0..1", usage)

    def _per_slot(self) -> Iterator[Metric]:
        n_draft = Gauge("pyspec_slot_n_draft", "draft length chosen for the last round", labels=["slot"])
        acceptance = Gauge("pyspec_slot_acceptance", "moving acceptance rate", labels=["slot"])
        for slot in self._slots():
            n_draft.add_metric([str(slot.slot)], slot.n_draft)
            acceptance.add_metric([str(slot.slot)], slot.acceptance)
        yield n_draft
        yield acceptance


def _spellings(names: Sequence[str]) -> Iterator[str]:
    for prefix, name in zip(("pyspec_", "llamacpp:", "vllm:"), names, strict=True):
        if name:
            yield prefix + name


def _per_position(name: str, about: str, counts: Iterable[int]) -> Metric:
    family = CounterMetricFamily(name, about, labels=["position"])
    for i, count in enumerate(counts):
        family.add_metric([str(i)], count)
    return family


def exposition(collector: EngineCollector, accept: str) -> tuple[bytes, str]:
    """The scrape's body and content type: Prometheus text, or OpenMetrics if the client accepts it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    encode, content_type = choose_encoder(accept)
    body: bytes = encode(registry)
    if content_type.startswith("text/plain"):  # in OpenMetrics every counter's name ends in _total
        body = body.replace(PEAK % b"gauge", PEAK % b"counter")
    return body, content_type
