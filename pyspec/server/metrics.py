"""`/metrics`: the engine's counters for Prometheus, read only when scraped.

Every figure has a native `pyspec_*` name. Figures that llama-server or vLLM publish also appear under their names, so existing
dashboards keep working.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from pyspec.engine.process.metrics_sum import GAUGES as NOW
from pyspec.ranges import docs_of
from pyspec.request import Metrics, ReplicaInfo
from pyspec.server.engine import EngineLike
from pyspec.server.latency import Latencies

# Descriptions by attribute: of Metrics, and of ReplicaInfo
ABOUT = docs_of(Metrics) | {"prompt_tokens_seen": "prompt tokens processed or cached"}
PER_POSITION = {name: ABOUT.pop(name) for name in ("drafted_per_pos", "accepted_per_pos")}
del ABOUT["busy_slot_rounds"]  # a part of an average
GAUGES = {name: about for name, about in ABOUT.items() if name in NOW or name == "n_tokens_max"}
COUNTERS = {name: about for name, about in ABOUT.items() if name not in GAUGES}
ROUTED = {
    name: docs_of(ReplicaInfo)[name] for name in ("requests", "prompt_tokens_known", "requests_moved")
}
# By prefix: names that are not those of the attributes. A native name is the attribute's unless it is here;
# a figure has a name of another server only if it is here.
NATIVE = "pyspec_"
NAMES: dict[str, dict[str, str]] = {
    NATIVE: {
        "restarts": "engine_restarts",
        "draft_ms": "draft_milliseconds",
        "verify_ms": "verify_milliseconds",
        "sample_ms": "sample_milliseconds",
        "host_ms": "host_milliseconds",
        "states": "checkpoints",
        "states_device_bytes": "checkpoint_device_bytes",
        "states_host_bytes": "checkpoint_host_bytes",
        "seconds_since_step": "step_age_seconds",
        "drafted_per_pos": "draft_tokens_per_pos",
        "accepted_per_pos": "accepted_tokens_per_pos",
    },
    "llamacpp:": {
        "prompt_tokens": "prompt_tokens",
        "prompt_tokens_cached": "prompt_tokens_cached",
        "prompt_seconds": "prompt_seconds",
        "predicted_tokens": "tokens_predicted",
        "predicted_seconds": "tokens_predicted_seconds",
        "rounds": "n_decode",
        "drafts": "spec_decode_num_drafts",
        "draft_tokens": "spec_decode_num_draft_tokens",
        "accepted_tokens": "spec_decode_num_accepted_tokens",
        "requests_processing": "requests_processing",
        "requests_queued": "requests_deferred",
        "n_tokens_max": "n_tokens_max",
        "accepted_per_pos": "spec_decode_num_accepted_tokens_per_pos",
    },
    "vllm:": {
        "prompt_tokens": "prompt_tokens",
        "prompt_tokens_cached": "prefix_cache_hits",
        "prompt_tokens_seen": "prefix_cache_queries",
        "predicted_tokens": "generation_tokens",
        "drafts": "spec_decode_num_drafts",
        "draft_tokens": "spec_decode_num_draft_tokens",
        "accepted_tokens": "spec_decode_num_accepted_tokens",
        "requests_processing": "num_requests_running",
        "requests_queued": "num_requests_waiting",
        "accepted_per_pos": "spec_decode_num_accepted_tokens_per_pos",
    },
}

PEAK = b"# TYPE llamacpp:n_tokens_max %s\n"
"""llama-server exports it as a counter because it never falls."""


class EngineCollector(Collector):
    """Reads the engine once per scrape."""

    def __init__(self, engine: EngineLike, latencies: Latencies) -> None:
        self._engine, self._latencies = engine, latencies

    def collect(self) -> Iterator[Metric]:
        m = self._engine.metrics()
        for attribute, about in (COUNTERS | GAUGES).items():
            for name in _spellings(attribute):
                yield _kind(attribute)(name, about, value=float(getattr(m, attribute)))
        for attribute, about in PER_POSITION.items():
            for name in _spellings(attribute):
                yield _per_position(name, about, getattr(m, attribute))
        yield from self._ratios(m)
        yield from self._per_slot()
        yield from self._latencies.metrics()
        if rows := self._engine.replicas():
            yield from _per_replica(rows)

    def _ratios(self, m: Metrics) -> Iterator[Metric]:
        """Averages since start; llama-server's figures of these names are averages since its last scrape."""
        prompt = m.prompt_tokens / m.prompt_seconds if m.prompt_seconds else 0.0
        predicted = m.predicted_tokens / m.predicted_seconds if m.predicted_seconds else 0.0
        busy = m.busy_slot_rounds / m.rounds if m.rounds else 0.0
        rate = m.accepted_tokens / m.draft_tokens if m.draft_tokens else 0.0
        hits = m.prompt_tokens_cached / m.prompt_tokens_seen if m.prompt_tokens_seen else 0.0
        for name, about, value in (
            ("llamacpp:prompt_tokens_seconds", "prompt tokens per second since start", prompt),
            ("llamacpp:predicted_tokens_seconds", "tokens per second since start", predicted),
            ("llamacpp:n_busy_slots_per_decode", "busy slots per target forward", busy),
            ("pyspec_draft_acceptance_rate", "accepted / drafted tokens since start", rate),
            ("pyspec_prefix_cache_hit_ratio", "cached / all prompt tokens since start", hits),
        ):
            yield Gauge(name, about, value)
        usage = m.pages_used / m.pages_total if m.pages_total else 0.0
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):  # and its older one
            yield Gauge(name, "share of cache pages in use, 0..1", usage)
        labels = ["block_size", "num_gpu_blocks"]
        pages = Gauge("vllm:cache_config_info", "pages of the cache, for routers", labels=labels)
        pages.add_metric([str(self._engine.info.page_size), str(m.pages_total)], 1.0)
        yield pages

    def _per_slot(self) -> Iterator[Metric]:
        about = "draft length chosen for the last round"
        n_draft = Gauge("pyspec_slot_n_draft", about, labels=["slot"])
        acceptance = Gauge("pyspec_slot_acceptance", "moving acceptance rate", labels=["slot"])
        for slot in self._engine.slots():
            n_draft.add_metric([str(slot.slot)], slot.n_draft)
            acceptance.add_metric([str(slot.slot)], slot.acceptance)
        yield n_draft
        yield acceptance


def _kind(attribute: str) -> type[CounterMetricFamily | Gauge]:
    return CounterMetricFamily if attribute in COUNTERS else Gauge


def _spellings(attribute: str) -> Iterator[str]:
    for prefix, names in NAMES.items():
        if attribute in names or prefix == NATIVE:
            yield prefix + names.get(attribute, attribute)


def _per_replica(rows: Sequence[ReplicaInfo]) -> Iterator[Metric]:
    """Figures of each of several engines, with its number as a label; other figures are their sums."""
    up = Gauge("pyspec_replica_up", "1 if the engine runs", labels=["replica", "device"])
    for row in rows:
        up.add_metric([str(row.replica), row.device], float(row.state == "ok"))
    yield up
    for attribute, about in ROUTED.items():
        family = CounterMetricFamily(f"pyspec_replica_{attribute}", about, labels=["replica"])
        for row in rows:
            family.add_metric([str(row.replica)], getattr(row, attribute))
        yield family
    for attribute, about in (COUNTERS | GAUGES).items():
        name = f"pyspec_replica_{NAMES[NATIVE].get(attribute, attribute)}"
        figures = _kind(attribute)(name, about, labels=["replica"])
        for row in rows:
            figures.add_metric([str(row.replica)], float(getattr(row.metrics, attribute)))
        yield figures


def _per_position(name: str, about: str, counts: Iterable[int]) -> Metric:
    family = CounterMetricFamily(name, about, labels=["position"])
    for i, count in enumerate(counts):
        family.add_metric([str(i)], count)
    return family


class ModelsCollector(Collector):
    """The figures of several models, each with its model as a label, and figures of their server.

    own  (value, description) by name
    """

    def __init__(
        self, collectors: Mapping[str, EngineCollector], own: Mapping[str, tuple[float, str]]
    ) -> None:
        self._collectors, self._own = collectors, own

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model, collector in self._collectors.items():
            for metric in collector.collect():
                family = families.setdefault(metric.name, metric)
                labelled = [s._replace(labels={"model": model, **s.labels}) for s in metric.samples]
                family.samples = [*(family.samples if family is not metric else ()), *labelled]
        yield from families.values()
        for name, (value, about) in self._own.items():
            yield Gauge(f"{NATIVE}{name}", about, value=float(value))


def exposition(collector: Collector, accept: str) -> tuple[bytes, str]:
    """The scrape's body and content type: Prometheus text, or OpenMetrics if the client accepts it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    encode, content_type = choose_encoder(accept)
    body: bytes = encode(registry)
    if content_type.startswith("text/plain"):  # in OpenMetrics every counter's name ends in _total
        body = body.replace(PEAK % b"gauge", PEAK % b"counter")
    return body, content_type
