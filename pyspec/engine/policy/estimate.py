"""The chance that drafted tokens are right, by slot and position.

`Acceptance` tells it from the current text of each slot, by a hidden Markov chain: a text is at one of a few levels of acceptance, and
sometimes changes to another. Each verdict updates the belief about its slot's level; all slots teach how common the levels are. If all texts
are alike, a slot's bad luck changes little; if they differ, a few verdicts change much. Deeper positions may be harder or easier than the
first; that is learned as well.

Where the drafter tells its own probability of a token, that is taken, too: by a logistic curve for each position of a draft, fitted while
drafts are judged, of the log-odds of that probability and of what is believed of the slot's text. So a sure drafter in a bad text and an unsure one in a
good text are both weighed by what came of it before. Newton's step after each round, with decayed sums: its state is four numbers and a matrix
of three by three a position.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Sources in brackets: least part of the tokens a millisecond of a recording with other values, by tools/replay.py
LEVELS = 1 / (1 + np.exp(-np.linspace(-4.0, 4.0, 15)))  # 0.02 to 0.98, evenly by odds
AT_FIRST = (
    0.6 / len(LEVELS) + 0.4 * (LEVELS > 0.7) / (LEVELS > 0.7).sum()
)  # initial shares of the levels: rather good
# chance per token that the text changes its level [1/400: 0.98, 1/40: 0.96, by tools/replay.py]
CHANGE = 1 / 120
INDEPENDENT = 0.1  # weight of a verdict for the shares: earlier verdicts were of the same text [0.02: 0.99, 0.5: the same]
PRIOR_COMMON, PRIOR_PLACE = (
    0.07,
    10.0,
)  # weights of the initial assumptions, in verdicts [of a place 1: 0.99, 100: 0.997]
ALIKE = (
    0.5  # prior chance that all texts have one level; this is learned soonest [0: 0.987 at 64 streams]
)
FORGET = 0.998  # decay per verdict of everything learned from all slots, and at a position [0.99: 0.99, 1: the same]
MOST_GRAMMARS = 64  # grammars whose acceptance is kept
LEARNED = "weights", "right", "meant", "seen", "alike"  # of a prior: what verdicts taught
INHERIT = 0.25  # part of a slot's last belief that the next text inherits [0 and 0.6: 0.99]
CURVE_AT_FIRST = (0.0, 0.4, 0.6)  # weights before any verdict: bias, the drafter's log-odds, the text's
CURVE_PRIOR = 4.0  # weight of these, as information of so many unsure tokens
FAR = 8.0  # log-odds beyond this count as this
LEAST_DOUBT = 0.05  # information of a token at least: a surprise where all seemed sure may not throw the curve over [0: 0.995]


def log_odds(p: Floats) -> Floats:
    """Bounded log-odds of probabilities."""
    p = p.clip(1e-6, 1 - 1e-6)
    return np.log(p / (1 - p)).clip(-FAR, FAR)


class AcceptancePrior:
    """Knowledge of many texts: shares of the levels, and how positions differ from the first.

    right, meant, seen  by position: drafts that were right, expected right by the first position's chance, and judged
    """

    def __init__(self, n_max: int, common: Floats | None = None) -> None:
        prior = AT_FIRST if common is None else common
        self.prior: Floats = prior / prior.sum() * PRIOR_COMMON
        self.weights = np.zeros(len(LEVELS))
        self.right = np.zeros(n_max)
        self.meant = np.zeros(n_max)
        self.seen = np.zeros(n_max)
        self.alike = np.zeros(len(LEVELS))  # log-likelihood of each level if all texts have the same
        self.n_max = n_max
        self.tabulate()

    def tabulate(self) -> None:
        """Compute common: shares of the levels, and chance, survive: [level, position]. survive has a leading column of ones."""
        common = self.prior + self.weights
        alike = np.exp(self.alike - self.alike.max()) * self.prior
        self.common: Floats = (1 - ALIKE) * common / common.sum() + ALIKE * alike / alike.sum()
        n = self.seen + 2 * PRIOR_PLACE
        right, meant = (self.right + PRIOR_PLACE) / n, (self.meant + PRIOR_PLACE) / n
        odds = right / (1 - right) * (1 - meant) / meant
        odds[:1] = 1.0
        times = (LEVELS / (1 - LEVELS))[:, None] * odds
        self.chance: Floats = times / (1 + times)
        self.survive: Floats = np.ones((len(LEVELS), self.n_max + 1))
        np.multiply.accumulate(self.chance, axis=1, out=self.survive[:, 1:])

    def learn(
        self,
        was: Floats,
        now: Floats,
        likelihood: Floats,
        n_draft: NDArray[np.int64],
        n_right: NDArray[np.int64],
        beyond: Floats,
    ) -> None:
        """Learn from verdicts. was, now: [verdict, level] beliefs before and after; likelihood: of each verdict, by level.

        beyond: as in `DraftVerdict`
        """
        keep = FORGET ** len(was)
        place = np.arange(self.n_max)
        is_next = (place == n_draft[:, None]) & (n_right >= n_draft)[:, None] & (beyond >= 0)[:, None]
        judged = ((place <= n_right[:, None]) & (place < n_draft[:, None])) | is_next
        reached = was @ self.survive[:, :-1]
        meant = (was @ (self.survive[:, :-1] * LEVELS[:, None])) / reached
        self.alike = keep * self.alike + np.log(likelihood).sum(axis=0)
        self.weights = keep * self.weights + INDEPENDENT * now.sum(axis=0)
        right = (place < n_right[:, None]) + np.where(is_next, beyond[:, None], 0.0)
        self.right = keep * self.right + right.sum(axis=0)
        self.meant = keep * self.meant + np.where(judged, meant, 0.0).sum(axis=0)
        self.seen = keep * self.seen + judged.sum(axis=0)
        self.tabulate()


class DraftVerdict(NamedTuple):
    """n_right of n_draft verified tokens of a slot were right.

    features  [drafted token, 3] of the curves, if the drafter tells how sure it is
    beyond    the chance of the first drafted token that was not verified, which counts as a verdict of that weight: else only likely tokens
              would be judged. Negative: all were verified, or it is not known
    """

    slot: int
    n_draft: int
    n_right: int
    features: Floats | None = None
    beyond: float = -1.0


class Acceptance:
    """The chance that drafts are right, for one drafter.

    curves, information  [position, 3], [position, 3, 3] of the drafter's own probabilities
    """

    def __init__(self, n_slot: int, n_max: int) -> None:
        self.n_slot, self.n_max = n_slot, n_max
        self.free = AcceptancePrior(n_max)  # without a grammar
        self.held = AcceptancePrior(n_max)  # under any grammar
        self.grammars: OrderedDict[str, AcceptancePrior] = OrderedDict()
        self.texts = [self.free] * n_slot
        self.beliefs: Floats = np.tile(self.free.common, (n_slot, 1))
        self.pending: dict[int, DraftVerdict] = {}  # by slot
        self.quiet = np.zeros(n_slot)  # tokens without a verdict
        self.curves: Floats = np.tile(np.array(CURVE_AT_FIRST), (n_max, 1))
        self.prior: Floats = CURVE_PRIOR * np.eye(3)
        self.information: Floats = np.tile(self.prior, (n_max, 1, 1))
        # by slot whose drafts await their verdict, features and chances of its tokens
        self.awaited: dict[int, tuple[Floats, Floats]] = {}

    def known(self) -> dict[str, list[float]]:
        """What is known of all texts without a grammar, for `recall`."""
        self.learn()
        return {name: getattr(self.free, name).tolist() for name in LEARNED}

    def recall(self, known: Mapping[str, Floats]) -> None:
        """Begin with what another start knew, as one assumption beside the others: its texts may have been of another kind. Raises ValueError
        if it can not be."""
        if any(known[name].shape != getattr(self.free, name).shape for name in LEARNED):
            raise ValueError("the drafter was another one")
        weights, right, meant, seen, alike = (known[name] for name in LEARNED)
        counts = np.stack([right, meant, seen - right, seen - meant])
        if min(weights.min(), counts.min(initial=0.0)) < -1e-6 or alike.max() > 1e-6:
            raise ValueError("a count can not be")
        alike = alike - alike.max()
        self.free.weights = weights * min(1.0, PRIOR_COMMON / max(weights.sum(), PRIOR_COMMON))
        self.free.alike = alike / max(-alike.min(), 1.0)
        self.free.right, self.free.meant, self.free.seen = right, meant, seen
        self.free.tabulate()
        self.beliefs[:] = self.free.common

    def held_texts(self) -> AcceptancePrior:
        """The prior for a new grammar: an even mix of free text and other grammars."""
        self.learn()
        return AcceptancePrior(self.n_max, 0.5 * (self.free.common + self.held.common))

    def of_grammar(self, grammar: str) -> AcceptancePrior:
        """What is known of texts under a grammar, by its source."""
        if grammar not in self.grammars:
            self.grammars[grammar] = self.held_texts()
        self.grammars.move_to_end(grammar)
        if len(self.grammars) > MOST_GRAMMARS:
            self.grammars.popitem(last=False)
        return self.grammars[grammar]

    def begin(self, slot: int, texts: AcceptancePrior) -> None:
        """Start another text in this slot."""
        self.learn()
        keep = INHERIT if self.texts[slot] is texts else 0.0
        self.texts[slot] = texts
        self.beliefs[slot] = keep * self.beliefs[slot] + (1 - keep) * texts.common
        self.quiet[slot] = 0.0
        self.awaited.pop(slot, None)

    def add(self, slot: int, n_draft: int, n_right: int) -> None:
        """Add a verdict; `learn` processes it later."""
        if not self.n_max:
            return  # there is no drafter
        if slot in self.pending:
            self.learn()
        n_draft = min(n_draft, self.n_max)
        features, chances = self.awaited.pop(slot, (None, ()))
        beyond = float(chances[n_draft]) if n_draft < len(chances) else -1.0
        self.pending[slot] = DraftVerdict(slot, n_draft, min(n_right, n_draft), features, beyond)

    def learn(self) -> None:
        """Process the pending verdicts."""
        if not self.pending:
            return
        verdicts = list(self.pending.values())
        self.pending.clear()
        for v in verdicts:
            self.quiet[v.slot] += v.n_right + 1
        if sure := [v for v in verdicts if v.features is not None]:
            self._fit_sure(sure)
        drafted = [v for v in verdicts if v.n_draft or v.beyond >= 0]
        for texts, own in self._by_texts([v.slot for v in drafted]):
            at, n_draft, n_right = np.array([drafted[i][:3] for i in own], dtype=np.int64).T
            self._learn(texts, at, n_draft, n_right, np.array([drafted[i].beyond for i in own]))

    def _learn(
        self,
        texts: AcceptancePrior,
        slots: NDArray[np.int64],
        n_draft: NDArray[np.int64],
        n_right: NDArray[np.int64],
        beyond: Floats,
    ) -> None:
        was = self.beliefs[slots]
        chance = texts.chance[:, np.minimum(n_right, self.n_max - 1)]
        unseen = np.where(beyond < 0, 1.0, beyond * chance + (1 - beyond) * (1 - chance))
        wrong = np.where(n_right < n_draft, 1 - chance, unseen)
        likelihood = (texts.survive[:, n_right] * wrong).T
        now = was * likelihood
        now /= now.sum(axis=1, keepdims=True)
        before, others = texts.common, (len(was) - 1) / len(was)
        for each in (texts,) if texts is self.free else (texts, self.held):
            each.learn(was, now, likelihood, n_draft, n_right, beyond)
        now *= (texts.common / before) ** others  # apply what the other slots showed, too
        self.beliefs[slots] = now / now.sum(axis=1, keepdims=True)
        self._age(texts, slots)

    def _age(self, texts: AcceptancePrior, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """Let beliefs drift: texts may have changed since."""
        stay = ((1 - CHANGE) ** self.quiet[slots])[:, None]
        self.beliefs[slots] = stay * self.beliefs[slots] + (1 - stay) * texts.common
        self.quiet[slots] = 0.0

    def _by_texts(self, slots: Sequence[int]) -> list[tuple[AcceptancePrior, NDArray[np.int64]]]:
        """Indices into `slots`, grouped by prior."""
        kinds: dict[int, list[int]] = {}
        for i, slot in enumerate(slots):
            kinds.setdefault(id(self.texts[slot]), []).append(i)
        return [(self.texts[slots[own[0]]], np.array(own)) for own in kinds.values()]

    def _believed(
        self, slots: Sequence[int]
    ) -> Iterator[tuple[AcceptancePrior, NDArray[np.int64], Floats]]:
        """For each prior: its indices into `slots`, and the current beliefs about their levels."""
        self.learn()
        at = np.array(slots)
        for texts, own in self._by_texts(slots):
            self._age(texts, at[own])
            yield texts, own, self.beliefs[at[own]]

    def survive(self, slots: Sequence[int], sure: Sequence[Sequence[float]] | None = None) -> Floats:
        """[slot, position]: P(the position and all before it are right).

        sure: the drafter's probability of each drafted token, by the same slots. The verdicts on these drafts are expected then
        """
        found = np.empty((len(slots), self.n_max))
        for texts, own, beliefs in self._believed(slots):
            found[own] = beliefs @ texts.survive[:, 1:]
        if sure is None:
            return found
        most, self.awaited = max(map(len, sure)), {}
        probs = np.array([[*each, *[0.5] * (most - len(each))] for each in sure])
        x = self.features(probs, found[:, :most])
        chance = self.chances(x)
        for i, each in enumerate(sure):
            self.awaited[slots[i]] = x[i, : len(each)], chance[i, : len(each)]
        return chance.cumprod(axis=1)

    def value_of_information(
        self, slots: Sequence[int], place_cost: float, draft_cost: float | Floats
    ) -> Floats:
        """Tokens per round that each slot would gain if its text's level were known.

        Costs of a place and of a draft (or of drafts of every length) are in tokens.
        """
        found = np.empty(len(slots))
        for texts, own, beliefs in self._believed(slots):
            worth = (texts.survive[:, 1:] - place_cost).cumsum(axis=1) - draft_cost
            known = beliefs @ np.maximum(worth.max(axis=1), 0.0)
            found[own] = known - np.maximum((beliefs @ worth).max(axis=1), 0.0)
        return found

    # -- curves of the drafter's own probabilities ----------------------------------------------------------------

    def _fit_sure(self, verdicts: Sequence[DraftVerdict]) -> None:
        """Learn from verdicts on drafts whose drafter tells how sure it is, of one round or some."""
        found = [v.features for v in verdicts if v.features is not None]
        x = np.zeros((len(found), max(map(len, found)), 3))
        for i, own in enumerate(found):
            x[i, : len(own)] = own
        self.fit(x, [v.n_draft for v in verdicts], [v.n_right for v in verdicts])

    def features(self, probs: Floats, survive: Floats) -> Floats:
        """[slot, position, 3]. probs: the drafter's; survive: P(the position and all before it are right) as believed. Both [slot, position]."""
        before = np.concatenate([np.ones((len(survive), 1)), survive[:, :-1]], axis=1)
        believed = survive / np.maximum(before, 1e-9)
        return np.stack([np.ones_like(probs), log_odds(probs), log_odds(believed)], axis=-1)

    def chances(self, features: Floats) -> Floats:
        """[slot, position]: P(right, given that all before it are)."""
        curves = self.curves[: features.shape[1]]
        chance: Floats = 1 / (1 + np.exp(-(features * curves).sum(axis=-1)))
        return chance

    def fit(self, features: Floats, n_draft: Sequence[int], n_right: Sequence[int]) -> None:
        """Learn from the verdicts of a round. features: [slot, position, 3]; n_draft: verified tokens of each slot."""
        place = np.arange(features.shape[1])
        right = np.array(n_right)[:, None]
        is_judged = (place <= right) & (place < np.array(n_draft)[:, None])
        n = is_judged.sum(axis=0)
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
        self.curves[at] += step
