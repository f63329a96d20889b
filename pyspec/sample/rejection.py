"""The verdict on drafts that were drawn from a known distribution: block verification (Sun et al., arXiv:2403.10444).

Tokens have the target's distribution, and no fewer drafts are accepted than row by row. Whether a draft x is accepted depends on p(x) / q(x)
in its row and in those before. The row behind the last accepted draft draws from the rest of p. The coins are hashed from the
round's first position, because a coin must not decide twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from pyspec.sample import chain
from pyspec.sample.sampler import SlotSampler
from pyspec.slots.drafts import Drafts
from pyspec.slots.race import winners


@dataclass(frozen=True, slots=True)
class DrawnSpan:
    """The verified drafts of one slot, and q [n, vocab] f32 of the first n, n > 0.

    Its drafts may be cut by anything but their own tokens: a grammar's cut would favour the tokens that it leaves. Whether there is a next
    draft may depend on a draft.
    """

    sampler: SlotSampler
    drafts: Sequence[int]
    q: Tensor

    @classmethod
    def of(cls, sampler: SlotSampler, usable: Sequence[int], drafts: Drafts) -> DrawnSpan:
        """usable: the first of the drafts, which have probabilities."""
        assert drafts.q is not None
        return cls(sampler, usable, drafts.q)

    @property
    def n_row(self) -> int:
        return len(self.drafts) + 1

    @property
    def n(self) -> int:
        """Drafts that were drawn."""
        return min(len(self.q), len(self.drafts))


@dataclass(frozen=True, slots=True)
class _Places:
    """Where things are, int64 and on the device of the logits. A table has a line for each span, one place longer than the longest draft.

    width    places of a line
    own      [draft]  row of each drawn draft
    span     [draft]  its span
    place    [draft]  its place in a table, flat
    drafts   [draft]  its token
    behind   [n]      rows behind drawn drafts
    first    [span]   the first draft of each span
    ends     [span]   how many were drawn
    """

    width: int
    own: Tensor
    span: Tensor
    place: Tensor
    drafts: Tensor
    behind: Tensor
    first: Tensor
    ends: Tensor

    @classmethod
    def of(cls, spans: Sequence[DrawnSpan], device: torch.device) -> _Places:
        """A single transfer to the device."""
        starts = [0, *accumulate(span.n_row for span in spans)]
        width = max(span.n for span in spans) + 1
        each = [(s, i) for s, span in enumerate(spans) for i in range(span.n)]
        lists = [
            [starts[s] + i for s, i in each],
            [s for s, _ in each],
            [s * width + i for s, i in each],
            [spans[s].drafts[i] for s, i in each],
            [starts[s] + i for s, span in enumerate(spans) for i in range(span.n, span.n_row)],
            [0, *accumulate(span.n for span in spans)][:-1],
            [span.n for span in spans],
        ]
        flat = torch.tensor([value for part in lists for value in part]).to(device)
        return cls(width, *flat.split([len(part) for part in lists]))


def verdicts(rows: Tensor, spans: Sequence[DrawnSpan]) -> Tensor:
    """The tokens of the spans' rows, [row] int64, on the rows' device: of each span they equal its drafts as long as these are accepted.

    rows  [row, vocab] f32  the spans' edited logits, one span after the other

    Drawn rows behind the first one that accepts no draft hold its token again.
    """
    at = _Places.of(spans, rows.device)
    params = [span.sampler.params for span in spans for _ in range(span.n_row)]
    noise = [u for span in spans for u in span.sampler.noise(span.n_row).tolist()]
    settings = chain.Settings.stack(params, noise, rows.shape[1], rows.device)
    p = chain.probabilities(rows, settings)
    q = torch.cat([span.q[: span.n] for span in spans]).double()
    own, ids = p[at.own], torch.arange(rows.shape[1], device=rows.device)[None]
    kept = _kept(at, *(x.gather(1, at.drafts[:, None])[:, 0] for x in (own, q)))
    left = own.mul(kept.view(-1)[at.place, None]).sub_(q).clamp_(min=0.0)
    rest = left.sum(-1)
    coins = np.stack([span.sampler.accepts(at.width) for span in spans])
    n_accepted = _accepted(at, kept, rest, torch.from_numpy(coins).to(rows.device))
    # The row that refuses, or any where none does: its token is not used then
    last = at.first + torch.minimum(n_accepted, at.ends - 1)
    final = torch.where(rest[last, None] > 0, left[last], own[last])
    other = winners(final.log_(), settings.noise[at.own[last]], ids)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    is_kept = at.place % at.width < n_accepted[at.span]
    tokens[at.own] = torch.where(is_kept, at.drafts, other[at.span])
    tokens[at.behind] = winners(p[at.behind].log_(), settings.noise[at.behind], ids)
    return tokens


def _kept(at: _Places, p: Tensor, q: Tensor) -> Tensor:
    """The chance that so many drafts or more are accepted, given the drafts: k[0] = 1, k[i + 1] = min(1, k[i] * p[i] / q[i]).

    p, q    [draft]       f64, of the drafts
    return  [span, place] f64
    """
    ratios = p.new_zeros(len(at.ends) * at.width)
    ratios[at.place + 1] = (p / q).log()
    summed = ratios.view(-1, at.width).cumsum(1)
    return (summed - summed.cummax(1).values).exp()


def _accepted(at: _Places, kept: Tensor, rest: Tensor, coins: Tensor) -> Tensor:
    """How many drafts of each span are accepted, [span] int64. rest [draft] f64: the mass that its row draws from if it accepts none."""
    lost = rest + 1 - kept.view(-1)[at.place]
    chances = torch.zeros_like(kept)
    chances.view(-1)[at.place] = torch.where(lost > 0, rest / lost, 1.0)
    chances.scatter_(1, at.ends[:, None], kept.gather(1, at.ends[:, None]))
    number = torch.arange(at.width, device=kept.device)
    return torch.where(coins < chances, number, 0).amax(1)
