"""Samplers that steer by what they have chosen: mirostat and adaptive-p. What they remember belongs to committed tokens.

A value is never changed: a choice gives the value behind it, and a slot takes over that of the last token it commits. So drafts
that are refused leave nothing, and the text does not depend on them. A request that goes on in another engine starts with the
first value again: what it was is a sum over logits that nobody has any more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pyspec.request import SamplingParams, TokenLogprob

N_ESTIMATE = 100  # best tokens that mirostat 1 estimates the distribution's exponent from
PEAK, SHARPNESS, INV_WIDTH = 5.0, 10.0, 1.0 / 0.3  # of adaptive-p's transform


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


def n_within_mirostat(probs: Tensor, mu: float, version: int, n_vocab: int) -> int:
    """How many of the best tokens mirostat keeps (arXiv:2007.14966; version 2 cuts by surprise alone).

    probs  [n] f64  in descending order
    """
    if version == 2:
        surprise = -torch.log2(probs)
        beyond = (surprise > mu).nonzero()
        return max(1, int(beyond[0]) if len(beyond) else len(probs))
    n = min(N_ESTIMATE - 1, len(probs) - 1)
    if n < 1:
        return 1
    rank = torch.arange(n, dtype=torch.float64, device=probs.device)
    t = torch.log((rank + 2) / (rank + 1))
    b = torch.log(probs[:n] / probs[1 : n + 1])
    s = float((t * b).sum() / (t * t).sum())
    excess = s - 1.0
    try:
        k = ((excess * 2.0**mu) / (1.0 - n_vocab**-excess)) ** (1.0 / s)
    except (ZeroDivisionError, OverflowError):
        return 1
    if isinstance(k, complex) or not math.isfinite(
        k
    ):  # nothing fits; llama.cpp's cast to an integer gives 1 there, too
        return 1
    return max(1, min(int(k), len(probs)))


def adapted(probs: Tensor, feedback: Feedback, params: SamplingParams) -> Tensor:
    """Adaptive-p's logits from probabilities: highest at the one that brings the mean back to the target. [n] f64"""
    target = min(max(params.adaptive_target, 0.0), 1.0)
    aim = target if feedback.weight == 0 else 2.0 * target - feedback.seen / feedback.weight
    distance = (probs - min(max(aim, 0.0), 1.0)).abs() * INV_WIDTH
    return PEAK - SHARPNESS * distance * distance / (1.0 + distance)
