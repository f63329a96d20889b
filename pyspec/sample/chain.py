"""The cuts and the draw, on many rows at once, each row with its own settings.

A row is represented by its candidates: `ids` ascending and their `logits`. Order and meaning are llama.cpp's: top-k, typical, top-p, min-p,
temperature, draw. Differences:

* Equal logits: the lower id counts as the better one, everywhere (llama.cpp leaves it to the sort).
* Probabilities are integers in units of 2**-44 of the row's largest, so sums do not depend on how a device orders them
  and a row's choice does not depend on its neighbours. Tokens less likely than 2**-44 of the best are never drawn.
* Typical: a candidate with probability 0 has infinite score instead of NaN.
* The draw inverts the cumulative distribution in id order with a number hashed from seed and position, or is a race by that number
  (`slots.race`).
* temperature <= 0 is the argmax before the cuts; llama.cpp's typical could cut it away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.request import SamplingParams
from pyspec.slots.race import winners

_UNIT = 2.0**44  # 2**18 candidates of the largest weight still fit an int64
_N_SPARE = 32  # candidates fetched beyond top-k, so that ties at its edge can be ordered by id


@dataclass(frozen=True, slots=True)
class Settings:
    """The cut settings of each row, [row, 1] each, on the logits' device."""

    top_k: Tensor  # int64, > 0
    typical_p: Tensor  # f64
    top_p: Tensor  # f64
    min_p: Tensor  # f32, the logarithm; -inf keeps all
    min_keep: Tensor  # int64
    temperature: Tensor  # f64, > 0
    noise: Tensor  # f64, in [0, 1)
    typical: bool  # some row uses it
    nucleus: bool  # some row cuts by order: top-k, typical, top-p or min_keep; sorting is needed
    cuts: bool  # some row cuts at all
    races: bool = False  # draws are races

    @classmethod
    def stack(
        cls, params: list[SamplingParams], noise: list[float], n_vocab: int, device: torch.device
    ) -> Settings:
        """One entry of `params` and `noise` per row. A single transfer to the device."""
        table = torch.tensor(
            [
                [
                    float(min(p.top_k, n_vocab) if p.top_k > 0 else n_vocab),
                    p.typical_p,
                    p.top_p,
                    math.log(p.min_p) if p.min_p > 0 else -math.inf,
                    float(min(max(p.min_keep, 0), n_vocab)),
                    p.temperature,
                    u,
                ]
                for p, u in zip(params, noise, strict=True)
            ],
            dtype=torch.float64,
        ).to(device)
        columns = (table[:, i : i + 1] for i in range(7))
        k, typical, top_p, min_p, keep, temperature, noise_col = columns
        in_order = [
            0 < p.top_k < n_vocab or p.typical_p < 1 or p.top_p < 1 or p.min_keep > 1 for p in params
        ]
        return cls(
            top_k=k.long(),
            typical_p=typical,
            top_p=top_p,
            min_p=min_p.float(),
            min_keep=keep.long(),
            temperature=temperature,
            noise=noise_col,
            typical=any(p.typical_p < 1 for p in params),
            nucleus=any(in_order),
            cuts=any(in_order) or any(p.min_p > 0 for p in params),
        )


def best(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best candidates of each row and some more, without a full sort.

    ids      [row, n]  int64  ascending
    values   [row, n]  f32    complete above the least of them; the least may have ties outside
    """
    values, ids = logits.topk(min(k + _N_SPARE, logits.shape[1]))
    ids, order = ids.sort(-1)
    return ids, values.gather(1, order)


def ranked(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids and values of the k best candidates of each row, best first, the lower id first among equals. [row, k] each"""
    ids, values = best(logits, k)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    if ids.shape[1] < logits.shape[1] and bool((values[:, k - 1] == values[:, -1]).any()):
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return ids[:, :k], values[:, :k]


def mass(logits: Tensor) -> Tensor:
    """Sum of each row's fixed-point weights. [row, 1] int64"""
    scaled = (logits - logits.amax(-1, keepdim=True)).double()
    return (scaled.exp() * _UNIT).long().sum(-1, keepdim=True)


def pick(
    logits: Tensor, settings: Settings, total: Tensor | None = None, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cut and draw. A row without a finite maximum gives a meaningless column.

    logits  [row, n]  f32    candidates in ascending order of id
    total   [row, 1]  int64  mass of the whole row, if the candidates are only a part of it and top-p needs it
    ids     [row or 1, n]  int64  of the candidates, which races read; None: the whole vocabulary
    return  [row]     int64  the chosen candidate's column
            [row]     bool   a survivor equals the least candidate: wrong if there are more candidates elsewhere
    """
    if settings.cuts:
        keep = survivors(logits, settings, total)
    else:
        keep = torch.ones_like(logits, dtype=torch.bool)
    top = logits.masked_fill(~keep, -math.inf).amax(-1, keepdim=True)
    scaled = (logits - top).double() / settings.temperature
    if settings.races:
        ids = torch.arange(logits.shape[1], device=logits.device)[None] if ids is None else ids
        column = winners(scaled.masked_fill_(~keep, -math.inf), settings.noise, ids)
    else:
        column = _inverse(_weights(scaled, keep).cumsum(-1), settings.noise)
    least = logits.amin(-1, keepdim=True)  # if it is banned, so are all tokens elsewhere
    return column, (keep & (logits == least) & (least > -math.inf)).any(-1)


def _inverse(below: Tensor, noise: Tensor) -> Tensor:
    """The column in which each row's number falls. below [row, n] int64: sums of weights; noise [row, 1] f64"""
    target = torch.minimum((noise * below[:, -1:]).long(), below[:, -1:] - 1)
    return torch.searchsorted(below, target, right=True).squeeze(1).clamp(max=below.shape[1] - 1)


def probabilities(logits: Tensor, settings: Settings) -> Tensor:
    """Probabilities of the draws of whole rows, [row, n] f64."""
    kept = logits
    if settings.cuts:
        kept = logits.masked_fill(~survivors(logits, settings), -math.inf)
    return ((kept - kept.amax(-1, keepdim=True)).double() / settings.temperature).softmax(-1)


def survivors(logits: Tensor, settings: Settings, total: Tensor | None = None) -> Tensor:
    """Candidates left after top-k, typical, top-p and min-p. Same layout as `logits`; bool. `total` as for `pick`."""
    if not settings.nucleus:
        return logits >= logits.amax(-1, keepdim=True) + settings.min_p
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    keep = torch.arange(values.shape[1], device=values.device) < settings.top_k
    scaled = (values - values[:, :1]).double()
    if settings.typical:
        keep = _typical(scaled, keep, settings)
    weights = _weights(scaled, keep)
    rank = keep.long().cumsum(-1) - 1
    before = weights.cumsum(-1) - weights
    enough = before >= settings.top_p * (weights.sum(-1, keepdim=True) if total is None else total)
    keep &= ~enough | (settings.top_p >= 1) | (rank < settings.min_keep.clamp(min=1))
    top = values.masked_fill(~keep, -math.inf).amax(-1, keepdim=True)
    keep &= (values >= top + settings.min_p) | (rank < settings.min_keep.clamp(min=1))
    return torch.zeros_like(keep).scatter_(1, order, keep)


def _weights(scaled: Tensor, keep: Tensor) -> Tensor:
    """exp as fixed point; scaled <= 0 is relative to the row's largest. int64"""
    return (scaled.exp() * _UNIT).long().masked_fill(~keep, 0)


def _typical(scaled: Tensor, keep: Tensor, settings: Settings) -> Tensor:
    """Keep the tokens closest to the expected surprise until they have typical_p of the mass (arXiv:2202.00666)."""
    weights = _weights(scaled, keep)
    logp = scaled - weights.sum(-1, keepdim=True).double().div(_UNIT).log()
    terms = torch.where(weights > 0, logp.exp() * logp, 0.0)
    # Row by row: a sum over a [row, n] tensor may be split differently for other row counts.
    entropy = -torch.stack([row.sum() for row in terms.unbind()])[:, None]
    score = (-logp - entropy).abs().masked_fill(~keep | (weights == 0), math.inf)
    order = score.sort(dim=-1, stable=True).indices
    ranked = weights.gather(1, order)
    before = ranked.cumsum(-1) - ranked
    place = torch.arange(scaled.shape[1], device=scaled.device)
    mass = settings.typical_p * weights.sum(-1, keepdim=True)
    chosen = (before <= mass) | (place < settings.min_keep)
    chosen[:, 0] = True
    chosen = torch.zeros_like(keep).scatter_(1, order, chosen) | (settings.typical_p >= 1)
    return keep & chosen
