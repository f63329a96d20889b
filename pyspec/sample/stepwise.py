"""The samplers in any order, and those that look beyond the row: one row at a time, step by step.

A row's draw depends on its logits, the history, the seed, the position, and for mirostat and adaptive-p on earlier choices. So it is the same
with and without drafts. Names and meaning are llama.cpp's; the cuts are those of `chain`, so a chain in its own order chooses the same token
here and there. Differences from llama.cpp: those of `chain`, and a sampler that is named several times counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pyspec.request import DEFAULT_SAMPLERS, SamplingParams, TokenLogprob
from pyspec.sample import chain
from pyspec.sample.adaptive import adapted, n_within_mirostat
from pyspec.sample.feedback import Feedback, SpanChoice
from pyspec.sample.noise import Floats, Ints
from pyspec.sample.sampler import Edits, SlotSampler

_OFF = SamplingParams(top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, temperature=1.0)
_ON_HOST = 4096  # candidates: with fewer, a step costs less here than launching it there


@dataclass(slots=True)
class Candidates:
    """The remaining candidates of a row: ids ascending and their logits, which temperature divides when they are read."""

    ids: Tensor  # [n] int64
    logits: Tensor  # [n] f32, f64 behind adaptive-p
    temperature: float = 1.0

    def take(self, which: Tensor) -> None:
        """Keep some of them: a mask, or columns in ascending order."""
        self.ids, self.logits = self.ids[which], self.logits[which]
        if len(self.ids) <= _ON_HOST:
            self.ids, self.logits = self.ids.cpu(), self.logits.cpu()

    def scaled(self) -> Tensor:
        return self.logits if self.temperature == 1.0 else self.logits.double() / self.temperature

    def probs(self) -> Tensor:
        """[n] f64"""
        return ((self.logits - self.logits.amax()).double() / self.temperature).softmax(-1)

    def draw(self, row: RowInputs) -> int:
        """The column that the row's number draws."""
        off = replace(_OFF, temperature=self.temperature)
        settings = chain.Settings.stack([off], [row.draw], len(self.ids), self.logits.device)
        settings = replace(settings, races=row.races)
        return int(chain.pick(self.logits[None], settings, ids=self.ids[None])[0])


@dataclass(slots=True)
class RowInputs:
    """The inputs of a row's choice besides its logits. counts and dry: (ids, values) of the two penalties; races: so is its draw."""

    params: SamplingParams
    draw: float
    coin: float
    counts: tuple[Ints, Ints]
    dry: tuple[Ints, Floats]
    feedback: Feedback
    races: bool = False


def choose_span(
    rows: Tensor, sampler: SlotSampler, drafts: Sequence[int], edits: Edits, n_finite: int
) -> SpanChoice:
    """Choose for the rows of one slot, each as if the drafts before it were committed, until one is refused.

    rows      [row, vocab] f32  biased
    n_finite  rows before the first that has no finite maximum
    """
    params, out = sampler.params, SpanChoice()
    draws, coins = sampler.noise(len(drafts) + 1).tolist(), sampler.coins(len(drafts) + 1).tolist()
    feedback = sampler.feedback
    for i in range(n_finite):
        both = (edits.counts, edits.dry)
        counts, dry = ((ids[at == i], values[at == i]) for at, ids, values in both)
        row = RowInputs(params, draws[i], coins[i], counts, dry, feedback, sampler.races)
        token, feedback, left = choose_row(rows[i], row)
        out.tokens.append(token)
        out.feedback.append(feedback)
        if params.post_sampling and params.logprobs is not None:
            out.logprobs.append(_reported(left, token, params.logprobs))
        if i < len(drafts) and drafts[i] != token:
            break
    return out


def choose_row(logits: Tensor, row: RowInputs) -> tuple[int, Feedback, Candidates]:
    """The token of one row, the feedback behind it, and the candidates it was drawn from. logits: [vocab] f32"""
    params, left = row.params, Candidates(torch.arange(len(logits), device=logits.device), logits)
    if params.mirostat:
        return _mirostat(left, row)
    for name in params.samplers or DEFAULT_SAMPLERS:
        if name in STEPS:
            STEPS[name](left, row)
    if params.adaptive_target < 0:
        return int(left.ids[left.draw(row)]), row.feedback, left
    before = left.probs()
    left.logits, left.temperature = adapted(before, row.feedback, params), 1.0
    column = left.draw(row)
    feedback = row.feedback.after_probability(float(before[column]), params)
    return int(left.ids[column]), feedback, left


def _mirostat(left: Candidates, row: RowInputs) -> tuple[int, Feedback, Candidates]:
    n_vocab = len(left.ids)
    _temperature(left, row)
    order = _best_first(left)
    n = n_within_mirostat(left.probs()[order], row.feedback.mu, row.params.mirostat, n_vocab)
    left.take(order[:n].sort().values)
    column = left.draw(row)
    feedback = row.feedback.after_surprise(float(left.probs()[column]), row.params)
    return int(left.ids[column]), feedback, left


# -- the steps ---------------------------------------------------------------------------------------------------


def _best_first(left: Candidates) -> Tensor:
    """Columns, the best first and the lower id first among equals."""
    return left.logits.sort(descending=True, stable=True).indices


def _cut(left: Candidates, row: RowInputs, *, by: str) -> None:
    """The cut of one setting."""
    value = getattr(row.params, by)
    if value == getattr(_OFF, by):
        return
    params = replace(_OFF, min_keep=row.params.min_keep, **{by: value})
    settings = chain.Settings.stack([params], [0.0], len(left.ids), left.logits.device)
    if settings.cuts:
        left.take(chain.survivors(left.scaled()[None], settings)[0])


def _top_k(left: Candidates, row: RowInputs) -> None:
    k = row.params.top_k
    if 0 < k < len(left.ids):
        left.take(chain.ranked(left.logits[None], k)[0][0].sort().values)


def _top_n_sigma(left: Candidates, row: RowInputs) -> None:
    """Ban tokens more than n standard deviations below the best (arXiv:2411.07641). Banned tokens still count as candidates, as in
    llama.cpp."""
    if row.params.top_n_sigma <= 0 or len(left.ids) < 2:
        return
    finite = left.logits[left.logits > -math.inf].double()
    floor = finite.max() - row.params.top_n_sigma * finite.std(correction=0)
    left.logits = left.logits.masked_fill(left.logits.double() < floor, -math.inf)


def _xtc(left: Candidates, row: RowInputs) -> None:
    """With a probability, drop all tokens above the threshold but the least likely one."""
    params = row.params
    if (
        params.xtc_probability <= 0
        or params.xtc_threshold > 0.5
        or len(left.ids) < 2
        or row.coin > params.xtc_probability
    ):
        return
    order = _best_first(left)
    n_above = int((left.probs()[order] >= params.xtc_threshold).cumprod(0).sum())
    if n_above > 1 and len(order) - (n_above - 1) >= params.min_keep:
        left.take(order[n_above - 1 :].sort().values)


def _temperature(left: Candidates, row: RowInputs) -> None:
    params, value = row.params, row.params.temperature
    if params.dynatemp_range > 0 and not params.mirostat:
        if len(left.ids) < 2:
            return
        probs = left.probs()
        surprise = torch.where(probs > 0, probs * probs.log(), 0.0)
        entropy = -surprise.sum().item() / math.log(len(probs))
        low, high = max(0.0, value - params.dynatemp_range), value + params.dynatemp_range
        value = low + (high - low) * max(entropy, 0.0) ** params.dynatemp_exponent
    if value <= 0:
        left.take(_best_first(left)[:1])
    else:
        left.temperature *= value


def _penalties(left: Candidates, row: RowInputs) -> None:
    ids, counts = row.counts
    if len(ids):
        at, number = _columns(left, ids, counts.astype(np.float32))
        params, old = row.params, left.logits[at]
        old = torch.where(old <= 0, old * params.repeat_penalty, old / params.repeat_penalty)
        offset = number * params.frequency_penalty + params.presence_penalty
        left.logits = left.logits.index_copy(0, at, (old - offset).to(left.logits.dtype))


def _dry(left: Candidates, row: RowInputs) -> None:
    ids, penalties = row.dry
    if len(ids):
        at, penalty = _columns(left, ids, penalties)
        left.logits = left.logits.index_copy(0, at, left.logits[at] - penalty.to(left.logits.dtype))


def _columns(left: Candidates, ids: Ints, values: Floats) -> tuple[Tensor, Tensor]:
    """The columns of these ids among the remaining candidates, and the values of those that remain."""
    device = left.ids.device
    wanted, numbers = torch.from_numpy(ids).to(device), torch.from_numpy(values).to(device)
    at = torch.searchsorted(left.ids, wanted).clamp(max=len(left.ids) - 1)
    here = left.ids[at] == wanted
    return at[here], numbers[here]


STEPS: dict[str, Callable[[Candidates, RowInputs], None]] = {
    "penalties": _penalties,
    "dry": _dry,
    "top_n_sigma": _top_n_sigma,
    "top_k": _top_k,
    "typ_p": partial(_cut, by="typical_p"),
    "top_p": partial(_cut, by="top_p"),
    "min_p": partial(_cut, by="min_p"),
    "xtc": _xtc,
    "temperature": _temperature,
}


def _reported(left: Candidates, token: int, n: int) -> TokenLogprob:
    """Log probabilities of the distribution that was drawn from: the chosen token's and the n best ones."""
    probs = left.probs()
    best = probs.sort(descending=True, stable=True).indices[:n]
    top = [(int(left.ids[i]), math.log(p)) for i in best.tolist() if (p := float(probs[i])) > 0]
    own = float(probs[(left.ids == token).nonzero()[0, 0]])
    return TokenLogprob(token, math.log(own), tuple(top))
