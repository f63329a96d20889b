"""Sums the counters of successive engines."""

from __future__ import annotations

from dataclasses import fields
from itertools import zip_longest
from typing import Any

from pyspec.request import Metrics

GAUGES = {
    "requests_processing", "requests_queued", "pages_used", "pages_total", "pages_cached", "states", "states_device_bytes",
    "states_host_bytes", "suffix_bytes", "disk_bytes", "seconds_since_step",
}  # fmt: skip
"""Fields of Metrics that describe the current engine; all others are counters."""


def metrics_sum(past: Metrics, now: Metrics) -> Metrics:
    """The sum of two engines' counters, with the second one's gauges."""
    values: dict[str, Any] = {}
    for f in fields(Metrics):
        a, b = getattr(past, f.name), getattr(now, f.name)
        if f.name in GAUGES:
            values[f.name] = b
        elif f.name == "n_tokens_max":
            values[f.name] = max(a, b)
        elif isinstance(b, tuple):
            values[f.name] = tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))
        else:
            values[f.name] = a + b
    return Metrics(**values)
