"""Memory of samplers that steer by their earlier choices: mirostat and adaptive-p. It belongs to committed tokens.

A value is never changed: a choice gives the next value, and a slot takes over that of the last token it commits. So refused drafts leave
nothing, and the text does not depend on them. A request that continues in another engine starts with the first value: the old one is a
sum over logits that are gone.
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
        """Mirostat chose a token of this probability among those it kept."""
        surprise = -math.log2(max(probability, 1e-30))
        return replace(self, mu=self.mu - params.mirostat_eta * (surprise - params.mirostat_tau))

    def after_probability(self, probability: float, params: SamplingParams) -> Feedback:
        """Adaptive-p chose a token that had this probability before its transform."""
        decay = params.adaptive_decay
        return replace(self, seen=probability + decay * self.seen, weight=1.0 + decay * self.weight)


@dataclass(slots=True)
class SpanChoice:
    """`tokens` of a span, one a row up to the first that differs from its draft; the feedback of adaptive samplers behind each; and the
    probabilities that were drawn from, if requested."""

    tokens: list[int] = field(default_factory=list)
    feedback: list[Feedback] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
