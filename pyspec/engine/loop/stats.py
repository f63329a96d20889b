"""Counters of a running engine, for `/metrics` and the benchmarks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields

from pyspec.engine.loop.job import Job, at_least
from pyspec.registry import SUFFIX
from pyspec.request import Metrics


@dataclass
class Stats:
    """Written by the engine's thread only. A reader may see a round counted in part, but never a wrong type. Most names are those of Metrics."""

    n_max: int  # most drafted tokens
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_disk: int = 0
    prompt_seconds: float = 0.0
    predicted_tokens: int = 0
    predicted_seconds: float = 0.0
    requests_done: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0
    rounds: int = 0
    busy_slot_rounds: int = 0
    n_tokens_max: int = 0
    drafts: int = 0
    suffix_drafts: int = 0
    suffix_draft_tokens: int = 0
    suffix_accepted_tokens: int = 0
    guard_trips: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    sample_ms: float = 0.0
    host_ms: float = 0.0
    used: list[int] = field(default_factory=list)  # verdicts by n_draft
    right: list[int] = field(default_factory=list)  # verdicts by n_accepted
    last_step: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.used, self.right = [0] * (self.n_max + 1), [0] * (self.n_max + 1)

    def reset(self) -> None:
        """Reset every counter."""
        fresh = Stats(self.n_max)
        for f in fields(self):
            setattr(self, f.name, getattr(fresh, f.name))

    def round(self, *, busy: int, times: tuple[float, float, float, float, float]) -> None:
        """Count a round. times: when it began, drafted, verified, sampled and ended, in seconds."""
        began, drafted, verified, sampled, ended = times
        self.rounds += 1
        self.busy_slot_rounds += busy
        self.draft_ms += 1e3 * (drafted - began)
        self.verify_ms += 1e3 * (verified - drafted)
        self.sample_ms += 1e3 * (sampled - verified)
        self.host_ms += 1e3 * (ended - sampled)
        self.last_step = time.monotonic()

    def verdict(self, n_draft: int, n_accepted: int, source: str = "") -> None:
        """Count a slot's verdict. source: of its draft, as in `Drafts`."""
        self.drafts += n_draft > 0
        if source == SUFFIX and n_draft:
            self.suffix_drafts += 1
            self.suffix_draft_tokens += n_draft
            self.suffix_accepted_tokens += n_accepted
        self.used[n_draft] += 1
        self.right[n_accepted] += 1

    def finished(self, job: Job, finish: str) -> None:
        """Count a request that ended in any way, while its slot is still its own."""
        t = job.settle()
        self.requests_done += finish not in ("cancelled", "error")
        self.requests_cancelled += finish == "cancelled"
        self.requests_failed += finish == "error"
        self.prompt_tokens += t.prompt_n
        self.prompt_tokens_cached += t.cache_n
        self.prompt_tokens_disk += t.disk_n
        self.prompt_seconds += t.prompt_ms / 1e3
        self.predicted_seconds += t.predicted_ms / 1e3
        self.n_tokens_max = max(self.n_tokens_max, job.n_prompt + job.n_predicted)

    def counted(self) -> Metrics:
        """The counters, without gauges."""
        drafted, accepted = at_least(self.used), at_least(self.right)
        return Metrics(
            **{name: getattr(self, name) for name in COUNTERS},
            draft_tokens=sum(drafted),
            accepted_tokens=sum(accepted),
            drafted_per_pos=tuple(drafted),
            accepted_per_pos=tuple(accepted),
        )


COUNTERS = {f.name for f in fields(Stats)} & {f.name for f in fields(Metrics)}
