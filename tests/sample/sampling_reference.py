"""The sampler chain again, slowly: one row, plain Python floats, lists and dicts. Nothing here is shared with the package."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from pyspec.request import SamplingParams

VERY_SMALL = 1e-9


class TooCloseToCall(Exception):
    """Rounding decides this case; the caller should take another one."""


def edited(
    logits: Sequence[float], params: SamplingParams, history: Sequence[int], eog: Sequence[int] = ()
) -> list[float]:
    """Logits after bias, the ban on end tokens, penalties and DRY without breakers."""
    out = list(logits)
    for token, value in params.logit_bias:
        out[token] += value
    if params.ignore_eos:
        for token in eog:
            out[token] = -math.inf
    window = (
        list(history)
        if params.repeat_last_n < 0
        else list(history)[max(0, len(history) - params.repeat_last_n) :]
    )
    for token, n in Counter(window).items():
        value = (
            out[token] * params.repeat_penalty if out[token] <= 0 else out[token] / params.repeat_penalty
        )
        out[token] = value - n * params.frequency_penalty - params.presence_penalty
    for token, n in dry_lengths(history, params).items():
        out[token] -= params.dry_multiplier * params.dry_base ** (n - params.dry_allowed_length)
    return out


def dry_lengths(history: Sequence[int], params: SamplingParams) -> dict[int, int]:
    """For each token that once followed the text's ending: the length of that repeated ending."""
    if params.dry_multiplier == 0 or params.dry_penalty_last_n == 0:
        return {}
    last_n = params.dry_penalty_last_n
    text = list(history) if last_n < 0 else list(history)[max(0, len(history) - last_n) :]
    longest: dict[int, int] = {}
    for end in range(1, len(text)):  # an earlier occurrence ends before `end`; text[end] followed it
        n = 0
        while n < end and text[end - 1 - n] == text[-1 - n]:
            n += 1
        if n >= params.dry_allowed_length and len(text) > params.dry_allowed_length:
            longest[text[end]] = max(n, longest.get(text[end], 0))
    return longest


def distribution(logits: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """Probability of each token that survives the cuts, after temperature. Ids ascend."""
    left = [i for i in range(len(logits)) if logits[i] > -math.inf]
    left.sort(key=lambda i: (-logits[i], i))
    if params.greedy:
        return {left[0]: 1.0}
    if params.top_k > 0:
        left = left[: params.top_k]
    if params.typical_p < 1:
        left = _typical(logits, left, params)
    if params.top_p < 1:
        left = _top_p(logits, left, params)
    if params.min_p > 0:
        least = max(params.min_keep, 1)
        floor = logits[left[0]] + math.log(params.min_p)
        _check(logits[i] - floor for i in left)
        left = [i for rank, i in enumerate(left) if logits[i] >= floor or rank < least]
    return dict(sorted(_softmax(logits, left, params.temperature).items()))


def draw(probabilities: dict[int, float], u: float) -> int:
    """Inverse distribution function in id order."""
    total = 0.0
    for token, p in probabilities.items():
        total += p
        _check([total - u] if total < 1 - VERY_SMALL else [])
        if total > u:
            return token
    return next(reversed(probabilities))


def _typical(logits: Sequence[float], left: list[int], params: SamplingParams) -> list[int]:
    p = _softmax(logits, left, 1.0)
    entropy = -sum(x * math.log(x) for x in p.values() if x > 0)
    score = {i: abs(-math.log(p[i]) - entropy) if p[i] > 0 else math.inf for i in left}
    by_score = sorted(left, key=lambda i: score[i])
    _check(score[b] - score[a] for a, b in pairwise(by_score) if logits[a] != logits[b])
    total, n = 0.0, 0
    for n, i in enumerate(by_score, start=1):
        total += p[i]
        _check([total - params.typical_p])
        if total > params.typical_p and n >= params.min_keep:
            break
    return sorted(by_score[:n], key=lambda i: (-logits[i], i))


def _top_p(logits: Sequence[float], left: list[int], params: SamplingParams) -> list[int]:
    p = _softmax(logits, left, 1.0)
    total, n = 0.0, 0
    for n, i in enumerate(left, start=1):
        total += p[i]
        _check([total - params.top_p])
        if total >= params.top_p and n >= params.min_keep:
            break
    return left[:n]


def _softmax(logits: Sequence[float], left: list[int], temperature: float) -> dict[int, float]:
    top = max(logits[i] for i in left)
    weights = {i: math.exp((logits[i] - top) / temperature) for i in left}
    total = sum(weights.values())
    return {i: w / total for i, w in weights.items()}


def _check(differences: Iterable[float]) -> None:
    if any(abs(d) < VERY_SMALL for d in differences):
        raise TooCloseToCall
