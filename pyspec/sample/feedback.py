"""Samplers that steer by what they have chosen: mirostat and adaptive-p. What they remember belongs to committed tokens.

A value is never changed: a choice gives the value behind it, and a slot takes over that of the last token it commits. So drafts
that are refused leave nothing, and the text does not depend on them. A request that goes on in another engine starts with the
first value again: what it was is a sum over logits that nobody has any more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from pyspec.request import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class Feedback:
    """mu: mirostat's bound on surprise, in bits; seen / weight: adaptive-p's mean of the probabilities chosen."""

    mu: float = 0.0
    seen: float = 0.0
    weight: float = 0.0

    @classmethod
    def first(cls, params: SamplingParams) -> Feedback:
        """Before the first token."""
        share = 1.0 - params.adaptive_decay
        return cls(2.0 * params.mirostat_tau, max(params.adaptive_target, 0.0) / share, 1.0 / share)

    def after_surprise(self, probability: float, params: SamplingParams) -> Feedback:
        """Mirostat has chosen a token of this probability among those it kept."""
        surprise = -math.log2(max(probability, 1e-30))
        return replace(self, mu=self.mu - params.mirostat_eta * (surprise - params.mirostat_tau))

    def after_probability(self, probability: float, params: SamplingParams) -> Feedback:
        """Adaptive-p has chosen a token that had this probability before its transform."""
        decay = params.adaptive_decay
        return replace(self, seen=probability + decay * self.seen, weight=1.0 + decay * self.weight)


@dataclass(slots=True)
class SpanChoice:
    """`tokens` of a span, one a row up to the first that is not its draft; what adaptive samplers remember behind each; and the
    probabilities that were drawn from, if they were asked for."""

    tokens: list[int] = field(default_factory=list)
    feedback: list[Feedback] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
