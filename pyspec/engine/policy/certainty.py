"""Calibrates a drafter's own probability of a token to the chance that the token is right.

A logistic curve for each position of a draft, fitted while drafts are judged: of the log-odds of the drafter's probability, and of what is
believed of the slot's text (`Acceptance`). So a sure drafter in a bad text and an unsure one in a good text are both weighed by what came
of it before. Newton's step after each round, with decayed sums: its state is four numbers and a matrix of three by three a position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

AT_FIRST = (0.0, 0.4, 0.6)  # weights before any verdict: bias, the drafter's log-odds, the text's
PRIOR = (4.0, 4.0, 4.0)  # weight of these, as information of so many unsure tokens
FORGET = 0.999  # decay per verdict at a position [0.99: 0.992, 1: the same, by tools/replay.py]
FAR = 8.0  # log-odds beyond this count as this
MOST, STEP = 4.0, 0.25  # of a weight, and of its change in a round [change 0.05: 0.993, 1: the same]
LEAST_DOUBT = 0.05  # information of a token at least: a surprise where all seemed sure may not throw the curve over


def log_odds(p: Floats) -> Floats:
    """Bounded log-odds of probabilities."""
    p = p.clip(1e-6, 1 - 1e-6)
    return np.log(p / (1 - p)).clip(-FAR, FAR)


class Certainty:
    """The curves of one drafter.

    weights, information  [position, 3], [position, 3, 3]
    n_verdict             judged tokens
    """

    def __init__(self, n_max: int) -> None:
        self.n_max = n_max
        self.weights: Floats = np.tile(np.array(AT_FIRST), (n_max, 1))
        self.prior: Floats = np.diag(np.array(PRIOR))
        self.information: Floats = np.tile(self.prior, (n_max, 1, 1))
        self.n_verdict = 0
        self.row: dict[int, int] = {}  # of each slot whose drafts await their verdict, in these:
        self.n_draft: list[int] = []
        self.x: Floats = np.zeros((0, 0, 3))
        self.chance: Floats = np.zeros((0, 0))
        self.judged: list[tuple[int, int, int]] = []  # row, verified and right tokens

    def survive(self, drafts: Sequence[tuple[int, Sequence[float]]], believed: Floats) -> Floats:
        """[draft, position]: P(the position and all before it are right). drafts: slot, and the drafter's probability of each token.

        believed: the same without these probabilities. `judge` expects their verdicts.
        """
        most = max(len(probs) for _, probs in drafts)
        padded = np.array([[*probs, *[0.5] * (most - len(probs))] for _, probs in drafts])
        self.row = {slot: i for i, (slot, _) in enumerate(drafts)}
        self.n_draft = [len(probs) for _, probs in drafts]
        self.x = self.features(padded, believed[:, :most])
        self.chance = self.chances(self.x)
        return self.chance.cumprod(axis=1)

    def judge(self, slot: int, n_draft: int, n_right: int) -> float:
        """Note a verdict. The chance of the first drafted token that was not verified; -1.0: there is none, or it is not known."""
        row = self.row.pop(slot, None)
        if row is None:
            return -1.0
        self.judged.append((row, n_draft, n_right))
        return float(self.chance[row, n_draft]) if n_draft < self.n_draft[row] else -1.0

    def learn_judged(self) -> None:
        """Learn from the noted verdicts."""
        if self.judged:
            rows, n_draft, n_right = zip(*self.judged, strict=True)
            self.learn(self.x[list(rows)], n_draft, n_right)
        self.judged.clear()
        self.row.clear()

    def features(self, probs: Floats, survive: Floats) -> Floats:
        """[slot, position, 3]. probs: the drafter's; survive: P(the position and all before it are right) as believed. Both [slot, position]."""
        before = np.concatenate([np.ones((len(survive), 1)), survive[:, :-1]], axis=1)
        believed = survive / np.maximum(before, 1e-9)
        return np.stack([np.ones_like(probs), log_odds(probs), log_odds(believed)], axis=-1)

    def chances(self, features: Floats) -> Floats:
        """[slot, position]: P(right, given that all before it are)."""
        weights = self.weights[: features.shape[1]]
        chance: Floats = 1 / (1 + np.exp(-(features * weights).sum(axis=-1)))
        return chance

    def learn(self, features: Floats, n_draft: Sequence[int], n_right: Sequence[int]) -> None:
        """Learn from the verdicts of a round. features: [slot, position, 3]; n_draft: verified tokens of each slot."""
        place = np.arange(features.shape[1])
        right = np.array(n_right)[:, None]
        is_judged = (place <= right) & (place < np.array(n_draft)[:, None])
        n = is_judged.sum(axis=0)
        self.n_verdict += int(n.sum())
        at = n.nonzero()[0]
        if not len(at):
            return
        chance = self.chances(features)
        x = features[:, at]
        wrong_by = np.where(is_judged, (place < right) - chance, 0.0)[:, at]
        doubt = np.where(is_judged, np.maximum(chance * (1 - chance), LEAST_DOUBT), 0.0)[:, at]
        seen = np.einsum("sp,spi,spj->pij", doubt, x, x)
        keep = (FORGET ** n[at])[:, None, None]
        self.information[at] = keep * (self.information[at] - self.prior) + self.prior + seen
        pull = np.einsum("sp,spi->pi", wrong_by, x)
        step = np.linalg.solve(self.information[at], pull[..., None])[..., 0]
        self.weights[at] = (self.weights[at] + step.clip(-STEP, STEP)).clip(-MOST, MOST)
