"""Sums the counters of engines: successive ones, and several beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any

from pyspec.request import Metrics

GAUGES = {
    "requests_processing", "requests_queued", "pages_used", "pages_total", "pages_cached", "states", "states_device_bytes",
    "states_host_bytes", "suffix_bytes", "disk_bytes", "expert_caches_frozen", "seconds_since_step",
}  # fmt: skip
"""Fields of Metrics that describe the current engine; all others are counters."""


def metrics_sum(past: Metrics, now: Metrics) -> Metrics:
    """The sum of two engines' counters, with the second one's gauges."""
    gauges = {name: getattr(now, name) for name in GAUGES}
    return replace(_sums((past, now), ("n_tokens_max",)), **gauges)


def metrics_together(rows: Sequence[Metrics]) -> Metrics:
    """The figures of engines that run beside each other: sums, and the largest age and context."""
    return _sums(rows, ("seconds_since_step", "n_tokens_max"))


def _sums(rows: Sequence[Metrics], largest: Sequence[str]) -> Metrics:
    """Sums of all figures, by position where they are tuples, but the largest of some."""
    values: dict[str, Any] = {}
    for name in (f.name for f in fields(Metrics)):
        column = [getattr(row, name) for row in rows]
        if name in largest:
            values[name] = max(column)
        elif isinstance(column[0], tuple):
            values[name] = sums(column)
        else:
            values[name] = sum(column)
    return Metrics(**values)


def sums(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Sums by position, of rows that may have different lengths."""
    return tuple(map(sum, zip_longest(*rows, fillvalue=0)))
