"""How likely drafts are right: what a slot's text is like now, among the kinds of text there are.

A text is thought to be at one of a few levels, and to change to another now and then (a hidden Markov chain). Each verdict moves the
belief about its slot's level; how common levels are is learned from all slots. So where all texts are alike a slot's bad luck says
little, and where they differ a few verdicts say much. That deeper positions are harder or easier than the first is learned beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEVELS = 1 / (1 + np.exp(-np.linspace(-4.0, 4.0, 15)))  # 0.02 to 0.98, evenly by odds
AT_FIRST = (
    0.6 / len(LEVELS) + 0.4 * (LEVELS > 0.7) / (LEVELS > 0.7).sum()
)  # how common before anything is known: rather good
CHANGE = 1 / 120  # of a token, that the text behind it is of another level
INDEPENDENT = 0.1  # what one verdict counts for what is common: those before it were of the same text
PRIOR_COMMON, PRIOR_PLACE = 0.07, 10.0  # weights of what is assumed at first, in verdicts
ALIKE = 0.5  # how likely it is thought that all texts are of one level, which is learned soonest
FORGET = 0.998  # of what all slots taught, a verdict
INHERIT = 0.25  # of what was known of a slot's last text is thought of the next


class AcceptancePrior:
    """What is known of many texts: how common levels are, and how positions differ from the first.

    right, meant, seen  by position: drafts that were right, that the first position's chance would have meant, that were judged
    """

    def __init__(self, n_max: int, common: Floats | None = None) -> None:
        prior = AT_FIRST if common is None else common
        self.prior: Floats = prior / prior.sum() * PRIOR_COMMON
        self.weights = np.zeros(len(LEVELS))
        self.right, self.meant, self.seen = np.zeros(n_max), np.zeros(n_max), np.zeros(n_max)
        self.alike = np.zeros(len(LEVELS))  # log-likelihood of each level, were all texts of one
        self.n_max = n_max
        self.tabulate()

    def tabulate(self) -> None:
        """common: shares of the levels. chance, survive: [level, position]; survive has one more in front, which is 1."""
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
        self, was: Floats, now: Floats, said: Floats, n_draft: NDArray[np.int64], n_right: NDArray[np.int64]
    ) -> None:
        """was, now: [verdict, level], what was thought before and is behind it; said: how likely each level makes it."""
        keep = FORGET ** len(was)
        place = np.arange(self.n_max)
        judged = (place <= n_right[:, None]) & (place < n_draft[:, None])
        reached = was @ self.survive[:, :-1]
        meant = (was @ (self.survive[:, :-1] * LEVELS[:, None])) / reached
        self.alike = keep * self.alike + np.log(said).sum(axis=0)
        self.weights = keep * self.weights + INDEPENDENT * now.sum(axis=0)
        self.right = keep * self.right + (place < n_right[:, None]).sum(axis=0)
        self.meant = keep * self.meant + np.where(judged, meant, 0.0).sum(axis=0)
        self.seen = keep * self.seen + judged.sum(axis=0)
        self.tabulate()


class Acceptance:
    """What is thought of every slot's text.

    drafted, kept  of each slot lately
    """

    def __init__(self, n_slot: int, n_max: int) -> None:
        self.n_slot, self.n_max = n_slot, n_max
        self.free, self.held = AcceptancePrior(n_max), AcceptancePrior(n_max)  # without a grammar, and under any
        self.texts = [self.free] * n_slot
        self.beliefs: Floats = np.tile(self.free.common, (n_slot, 1))
        self.pending: dict[int, tuple[int, int, int]] = {}
        self.n_verdict = 0  # verdicts on drafts
        self.quiet = np.zeros(n_slot)  # tokens that came without a verdict

    def held_texts(self) -> AcceptancePrior:
        """Of a grammar that is new: as much is known from free text as from other grammars'."""
        self.learn()
        return AcceptancePrior(self.n_max, 0.5 * (self.free.common + self.held.common))

    def begin(self, slot: int, texts: AcceptancePrior) -> None:
        """Another text in this slot."""
        self.learn()
        keep = INHERIT if self.texts[slot] is texts else 0.0
        self.texts[slot] = texts
        self.beliefs[slot] = keep * self.beliefs[slot] + (1 - keep) * texts.common
        self.quiet[slot] = 0.0

    def add(self, slot: int, n_draft: int, n_right: int) -> None:
        """A verdict; it is looked at when somebody asks."""
        if slot in self.pending:
            self.learn()
        self.pending[slot] = slot, min(n_draft, self.n_max), min(n_right, n_draft, self.n_max)

    def learn(self) -> None:
        """Look at the verdicts that wait."""
        if not self.pending:
            return
        verdicts = np.array(list(self.pending.values()), dtype=np.int64)
        self.pending.clear()
        self.quiet[verdicts[:, 0]] += verdicts[:, 2] + 1
        drafted = verdicts[verdicts[:, 1] > 0]
        self.n_verdict += len(drafted)
        if len(drafted):
            for texts, own in self._by_texts(drafted[:, 0].tolist()):
                self._learn(texts, *drafted[own].T)

    def _learn(
        self, texts: AcceptancePrior, slots: NDArray[np.int64], n_draft: NDArray[np.int64], n_right: NDArray[np.int64]
    ) -> None:
        was = self.beliefs[slots]
        wrong = np.where(n_right < n_draft, 1 - texts.chance[:, np.minimum(n_right, self.n_max - 1)], 1.0)
        said = (texts.survive[:, n_right] * wrong).T
        now = was * said
        now /= now.sum(axis=1, keepdims=True)
        before, others = texts.common, (len(was) - 1) / len(was)
        for each in (texts,) if texts is self.free else (texts, self.held):
            each.learn(was, now, said, n_draft, n_right)
        now *= (texts.common / before) ** others  # what the others showed counts for this one, too
        self.beliefs[slots] = now / now.sum(axis=1, keepdims=True)
        self._age(texts, slots)

    def _age(self, texts: AcceptancePrior, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """AcceptancePrior may have changed since."""
        stay = ((1 - CHANGE) ** self.quiet[slots])[:, None]
        self.beliefs[slots] = stay * self.beliefs[slots] + (1 - stay) * texts.common
        self.quiet[slots] = 0.0

    def _by_texts(self, slots: Sequence[int]) -> list[tuple[AcceptancePrior, NDArray[np.int64]]]:
        """Places in `slots` of each kind of texts."""
        kinds: dict[int, list[int]] = {}
        for i, slot in enumerate(slots):
            kinds.setdefault(id(self.texts[slot]), []).append(i)
        return [(self.texts[slots[own[0]]], np.array(own)) for own in kinds.values()]

    def _believed(self, slots: Sequence[int]) -> Iterator[tuple[AcceptancePrior, NDArray[np.int64], Floats]]:
        """Kinds of texts, their places in `slots`, and what is thought of their levels now."""
        self.learn()
        at = np.array(slots)
        for texts, own in self._by_texts(slots):
            self._age(texts, at[own])
            yield texts, own, self.beliefs[at[own]]

    def survive(self, slots: Sequence[int]) -> Floats:
        """[slot, position]: P(the position and all before it are right)."""
        found = np.empty((len(slots), self.n_max))
        for texts, own, beliefs in self._believed(slots):
            found[own] = beliefs @ texts.survive[:, 1:]
        return found

    def value_of_information(self, slots: Sequence[int], place_cost: float, draft_cost: float | Floats) -> Floats:
        """Of each slot, how many tokens a round it would gain if its text's level were known. Costs of a place and of a draft (of drafts
        of every length), in tokens."""
        found = np.empty(len(slots))
        for texts, own, beliefs in self._believed(slots):
            worth = (texts.survive[:, 1:] - place_cost).cumsum(axis=1) - draft_cost
            known = beliefs @ np.maximum(worth.max(axis=1), 0.0)
            found[own] = known - np.maximum((beliefs @ worth).max(axis=1), 0.0)
        return found
