"""The probability transforms of mirostat and adaptive-p; their memory is in `feedback`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyspec.request import SamplingParams
from pyspec.sample.feedback import Feedback

N_ESTIMATE = 100  # best tokens from which mirostat 1 estimates the distribution's exponent
PEAK, SHARPNESS, INV_WIDTH = 5.0, 10.0, 1.0 / 0.3  # of adaptive-p's transform


def n_within_mirostat(probs: Tensor, mu: float, version: int, n_vocab: int) -> int:
    """The number of best tokens that mirostat keeps (arXiv:2007.14966; version 2 cuts by surprise alone).

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
    # nothing fits; llama.cpp's cast to an integer gives 1 there, too
    if isinstance(k, complex) or not math.isfinite(k):
        return 1
    return max(1, min(int(k), len(probs)))


def adapted(probs: Tensor, feedback: Feedback, params: SamplingParams) -> Tensor:
    """Adaptive-p's logits from probabilities: highest at the one that brings the mean back to the target. [n] f64"""
    target = min(max(params.adaptive_target, 0.0), 1.0)
    aim = target if feedback.weight == 0 else 2.0 * target - feedback.seen / feedback.weight
    distance = (probs - min(max(aim, 0.0), 1.0)).abs() * INV_WIDTH
    return PEAK - SHARPNESS * distance * distance / (1.0 + distance)
