"""Draws drafts from a drafter's own distribution, for several slots at once, on its device and without reading anything back.

Temperature, top-k, top-p and min-p are the request's. Where ranks need a sort they are found among the best candidates: another
distribution than the target's only costs drafts. Penalties, biases and grammars are left to the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.config import EngineSettings
from pyspec.slots.drafts import DraftDraw, DraftRequest
from pyspec.slots.race import winners

N_RANKED = 1024  # best candidates among which top-k and top-p cut
N_SETTING = 4
N_AT_ONCE = 16  # rows: more would take much memory, and no less time
ROW_BYTES = 44  # of a row's draw for each token of the vocabulary, for a while


def draw_bytes(settings: EngineSettings, n_draft: int, n_vocab: int) -> int:
    """Memory of draws, if drafts are drawn."""
    if settings.draft_sampling == "argmax":
        return 0
    kept = 4 * settings.np * n_draft if settings.draft_sampling == "probabilistic" else 0
    return n_vocab * (N_AT_ONCE * ROW_BYTES + 2 * kept)


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """The settings of rows of logits, [row, 1] each.

    temperature  f64; 0: the row takes its most likely token
    floor_p      f64, min_p as a logarithm; -inf keeps all
    noise        f64, of the rows' races
    ranked       some row is cut by top-k or top-p
    n_best       candidates that top-k leaves to any row, if all are cut by it; else 0
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    floor_p: Tensor
    noise: Tensor
    ranked: bool
    n_best: int

    def part(self, rows: slice) -> DrawnRows:
        """Some of the rows."""
        return DrawnRows(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.floor_p[rows],
            self.noise[rows],
            self.ranked,
            self.n_best,
        )


@dataclass(frozen=True, slots=True)
class Drawing:
    """The tokens that a drafter draws from.

    n_vocab    of the target
    to_target  [own token] int64: the target's token for each own one; None: they are the same
    one_to_one  no two own tokens are the same one of the target's
    """

    n_vocab: int
    to_target: Tensor | None
    device: torch.device
    one_to_one: bool = True

    @classmethod
    def of(cls, n_vocab: int, to_target: Tensor | None, device: torch.device) -> Drawing:
        """Fields as of the class; it is found whether tokens are different ones."""
        is_same = to_target is None or len(to_target.unique()) == len(to_target)
        return cls(n_vocab, to_target, device, is_same)

    def __call__(self, logits: Tensor, best: Tensor, rows: DrawnRows, q: Tensor | None = None) -> Tensor:
        """Tokens of the target's vocabulary, [row] int64.

        logits  [row, own token]  f32
        best    [row]             int64  the target's token for the largest logit of each row
        q       [row, n_vocab]    f32    written: the probabilities that the tokens were drawn by
        """
        if 0 < rows.n_best < logits.shape[1] and self.one_to_one:
            values, columns = logits.topk(rows.n_best)
            ids = columns if self.to_target is None else self.to_target[columns]
            tokens = ids.gather(1, among(values, ids, rows, q)[:, None])[:, 0]
            return torch.where(rows.temperature[:, 0] > 0, tokens, best)
        found = []
        for first in range(0, len(logits), N_AT_ONCE):
            part = slice(first, first + N_AT_ONCE)
            own = self._mapped(_cut(logits[part], rows.part(part)).softmax(-1))
            ids = torch.arange(self.n_vocab, device=own.device)[None]
            if q is not None:
                q[part] = own
            found.append(winners(own.double().log_(), rows.noise[part], ids))
        tokens = found[0] if len(found) == 1 else torch.cat(found)
        return torch.where(rows.temperature[:, 0] > 0, tokens, best)

    def _mapped(self, q: Tensor) -> Tensor:
        """Probabilities of own tokens as those of the target's, [row, n_vocab] f32."""
        if self.to_target is None and q.shape[1] == self.n_vocab:
            return q
        found = q.new_zeros(len(q), self.n_vocab)
        if self.to_target is not None:
            return found.index_add_(1, self.to_target, q)
        found[:, : q.shape[1]] = q
        return found


def among(scores: Tensor, ids: Tensor, rows: DrawnRows, q: Tensor | None = None) -> Tensor:
    """Places of the drawn candidates, [row] int64. A row's candidates are different tokens.

    scores  [row, candidate]  f32
    ids     [row, candidate]  int64  tokens of the target
    q       [row, n_vocab]    f32    written: the probabilities that the tokens were drawn by
    """
    scaled = _cut(scores, rows)
    if q is not None:
        q.zero_().scatter_add_(1, ids, scaled.softmax(-1))
    places = winners(scaled.double(), rows.noise, ids)
    return torch.where(rows.temperature[:, 0] > 0, places, scores.argmax(-1))


class Draws:
    """The draws of one round of drafts. keeps_q: their probabilities are asked for."""

    def __init__(self, draws: Sequence[DraftDraw | None], n_draft: int, drawing: Drawing) -> None:
        known = [draw for draw in draws if draw is not None]
        self.drawing, device = drawing, drawing.device
        self.keeps_q = any(draw.keeps_q for draw in known)
        self.is_ranked = any(draw.top_k > 0 or draw.top_p < 1 for draw in known)
        cuts = [draw.top_k for draw in known]
        self.n_best = max(cuts) if all(0 < k <= N_RANKED for k in cuts) else 0
        table = torch.tensor(
            [[*_settings(draw), *_noise(draw, n_draft)] for draw in draws], dtype=torch.float64
        )
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        self.settings, self.noise = table[:, :N_SETTING], table[:, N_SETTING:]
        n = n_draft if self.keeps_q else 0
        self.q = torch.empty(len(draws), n, drawing.n_vocab, device=device)

    @classmethod
    def of(cls, requests: Sequence[DraftRequest], n_draft: int, drawing: Drawing | None) -> Draws | None:
        """None if every request takes its most likely tokens."""
        draws = [request.draw for request in requests]
        is_drawn = drawing is not None and any(draw is not None for draw in draws)
        return cls(draws, n_draft, drawing) if drawing is not None and is_drawn else None

    def kept(self, requests: Sequence[DraftRequest]) -> dict[int, Tensor]:
        """By slot, the probabilities [draft, n_vocab] of the requests that asked for them."""
        return {
            r.slot.index: self.q[i, : r.n_draft]
            for i, r in enumerate(requests)
            if r.draw is not None and r.draw.keeps_q
        }

    def take(self, at: int, logits: Tensor, best: Tensor) -> Tensor:
        """Draft number `at` of every slot, [slot] int64. logits and best: a row of each slot, as for `Drawing`."""
        return self.drawing(logits, best, self._step(at), self._q_of(at))

    def take_among(self, at: int, scores: Tensor, ids: Tensor) -> Tensor:
        """Draft number `at` of every slot, as the place of a candidate, [slot] int64. scores and ids: a row of each slot, as for `among`."""
        return among(scores, ids, self._step(at), self._q_of(at))

    def block(self, logits: Tensor, best: Tensor) -> Tensor:
        """Tokens of every draft of the first slot, then of the next, [slot * draft] int64. logits and best: in this order, too."""
        n_draft = self.noise.shape[1]
        rows = self._rows(self.settings.repeat_interleave(n_draft, 0), self.noise.reshape(-1, 1))
        return self.drawing(logits, best, rows, self.q.flatten(0, 1) if self.keeps_q else None)

    def _step(self, at: int) -> DrawnRows:
        return self._rows(self.settings, self.noise[:, at : at + 1])

    def _q_of(self, at: int) -> Tensor | None:
        return self.q[:, at] if self.keeps_q else None

    def _rows(self, settings: Tensor, noise: Tensor) -> DrawnRows:
        temperature, top_k, top_p, floor_p = (settings[:, i : i + 1] for i in range(N_SETTING))
        top_k = top_k.long()
        return DrawnRows(temperature, top_k, top_p, floor_p, noise, self.is_ranked, self.n_best)


def _cut(logits: Tensor, rows: DrawnRows) -> Tensor:
    """Logits over temperature, relative to the largest, -inf where a cut drops the token. [row, token] f32"""
    peak = logits.amax(-1, keepdim=True)
    scaled = (logits - peak) / rows.temperature.clamp(min=1e-3).float()
    return scaled.masked_fill_(logits < _floor(logits, peak, rows), -math.inf)


def _floor(logits: Tensor, peak: Tensor, rows: DrawnRows) -> Tensor:
    """The least logit of each row that its cuts keep. [row, 1] f32"""
    floor = peak + rows.floor_p.float()
    if not rows.ranked:
        return floor
    values = logits.topk(min(N_RANKED, logits.shape[1])).values
    most = values.shape[1]
    n_k = torch.where(rows.top_k > 0, rows.top_k, logits.shape[1])
    rank = torch.arange(most, device=logits.device)
    weights = (values - peak).double().exp().masked_fill(rank >= n_k, 0.0)
    whole = (logits - peak).double().exp().sum(-1, keepdim=True)
    total = torch.where(n_k <= most, weights.sum(-1, keepdim=True), whole)
    inside = (weights.cumsum(-1) - weights < rows.top_p * total) & (rank < n_k)
    n = inside.sum(-1, keepdim=True)
    least = values.gather(1, (n - 1).clamp(min=0))
    # A cut beyond the candidates is none
    is_known = (n < most) | (n_k <= most)
    return torch.where(is_known, torch.maximum(floor, least), floor)


def _settings(draw: DraftDraw | None) -> list[float]:
    if draw is None:
        return [0.0, 0.0, 1.0, -math.inf]
    floor = math.log(draw.min_p) if draw.min_p > 0 else -math.inf
    return [draw.temperature, float(draw.top_k), draw.top_p, floor]


def _noise(draw: DraftDraw | None, n: int) -> list[float]:
    """Numbers of n drafts. Drafts behind the last known one are dropped."""
    noise = [] if draw is None else list(draw.noise[:n])
    return noise + [0.0] * (n - len(noise))
