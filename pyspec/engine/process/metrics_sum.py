"""Sums the counters of engines: successive ones, and several beside each other."""

from __future__ import annotations

from collections.abc import Sequence
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


def metrics_together(rows: Sequence[Metrics]) -> Metrics:
    """The figures of engines that run beside each other: sums, and the largest age and context."""
    values: dict[str, Any] = {}
    for f in fields(Metrics):
        column = [getattr(row, f.name) for row in rows]
        if f.name in ("seconds_since_step", "n_tokens_max"):
            values[f.name] = max(column)
        elif isinstance(column[0], tuple):
            values[f.name] = tuple(sum(counts) for counts in zip_longest(*column, fillvalue=0))
        else:
            values[f.name] = sum(column)
    return Metrics(**values)
