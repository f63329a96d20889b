"""The cost of rows by the experts that they bring, where a model has experts in host memory: new ones, which no row before has had in a round. Each is
read once, from the GPU's memory (a hit) or from the host's (a miss). Arithmetic only: no torch, and no clock.

The time of a round is a part by its number of rows (`Timer`) and a factor for each miss and each hit. Factors are learned from how rounds of one
size differ, by least squares over the last hundred or so, where a time that lies far off counts little. As long as rounds of a size hardly
differ, half of their time counts as that of their misses: then it makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# tests/test_control_experts.py holds these
OWN, ALL = 0.9, 0.98  # a slot's counts by place in it, and all slots', after another round
TINY = 1e-9
FEW = 0.05  # share of experts, below which misses or hits are too few to have a share of their own
COUNTS = 0.5  # rounds of a slot that count as much as all slots
LEAST = 0.3  # share of the experts of the row before that a row brings at least, where none was seen at its place
MEAN, SQUARES = 0.9, 0.99  # of a size's usual round, and of the sums of squares, after another round
FAR = 2.0  # usual deviations from which on a time counts less
REFIT = 8  # rounds
CHANGE = 0.02  # of a factor, that is worth to count all samples anew
PRIOR = 0.5  # share of a round's time that is its misses', by which rounds differ that are all the same; as much is the doubt
DOUBT = 0.1  # share that is its hits', about


class Brought(NamedTuple):
    """Experts of rows that no row before has had, in all layers: missing on the GPU, and there."""

    misses: float = 0.0
    hits: float = 0.0


NO_EXPERTS = Brought()


class RoundExperts(NamedTuple):
    """Experts that each row of a round has brought.

    slot          [row] int64
    place         [row] int64; 0: the anchor's
    misses, hits  [row] f64
    """

    slot: NDArray[np.int64]
    place: NDArray[np.int64]
    misses: Floats
    hits: Floats

    @classmethod
    def of(
        cls,
        slots: Sequence[int],
        misses: Sequence[Sequence[int]],
        hits: Sequence[Sequence[int]],
        total: Brought,
    ) -> RoundExperts:
        """Of counts by slot and row, without those of earlier rows of the slot alone. total: of the round, each once. Rows share it alike."""
        place = np.concatenate([np.arange(len(own)) for own in misses])
        slot = np.repeat(np.array(slots, np.int64), [len(own) for own in misses])
        rows = [np.concatenate([np.array(own, np.float64) for own in of]) for of in (misses, hits)]
        return cls(
            slot, place, *(row * (n / max(row.sum(), 1.0)) for row, n in zip(rows, total, strict=True))
        )

    @property
    def sum(self) -> Brought:
        return Brought(float(self.misses.sum()), float(self.hits.sum()))


class Factors(NamedTuple):
    """Milliseconds of a miss and of a hit, and the round for which times of all sizes stand in the table."""

    miss_ms: float = 0.0
    hit_ms: float = 0.0
    usual: Brought = NO_EXPERTS

    def beyond(self, brought: Brought) -> float:
        """Milliseconds of a round with these experts beyond those of the usual one."""
        usual = self.usual
        return self.miss_ms * (brought.misses - usual.misses) + self.hit_ms * (brought.hits - usual.hits)


class RowCosts:
    """Learns the factors, and the experts of rows by slot and place. n_place: rows of a slot at most."""

    def __init__(self, n_slot: int, n_place: int) -> None:
        self.n_slot, self.n_place = n_slot, n_place
        self.factors = Factors()
        self._means: dict[int, Floats] = {}  # by size: misses, hits, ms, rounds
        self._squares, self._with_ms = np.zeros((2, 2)), np.zeros(2)
        self._usual = np.zeros(3)  # of all sizes
        self._off = 0.0  # usual deviation, ms
        self._n = 0
        self.forget()

    def forget(self) -> None:
        """Forget all texts. Factors stay."""
        # by place: misses and hits, those of the first rows beside them, and rows
        self._all = np.zeros((5, self.n_place))
        self._own = np.zeros((5, self.n_slot, self.n_place))

    def begin(self, slot: int) -> None:
        """The slot has another text."""
        self._own[:, slot] = 0.0

    @property
    def is_known(self) -> bool:
        """Rows have brought experts since texts were forgotten."""
        return bool(self._all[4, 0])

    # -- experts of rows -----------------------------------------------------------------------------------------

    def see(self, of: RoundExperts) -> None:
        """Experts of a round's rows."""
        place = np.minimum(of.place, self.n_place - 1)
        own = np.stack([of.misses, of.hits])
        firsts = np.zeros((2, self.n_slot))
        firsts[:, of.slot[of.place == 0]] = own[:, of.place == 0]
        found = np.concatenate([own, firsts[:, of.slot], np.ones((1, len(place)))])
        self._own[:, of.slot, place] = OWN * self._own[:, of.slot, place] + found
        n = np.bincount(place, minlength=self.n_place)
        means = np.stack([np.bincount(place, row, self.n_place) for row in found]) / np.maximum(n, 1)
        self._all = np.where(n > 0, ALL * self._all + means, self._all)

    def expected(self, slots: Sequence[int]) -> Floats:
        """[misses and hits, slot, place]: experts of the rows of these slots, as expected. First rows bring as many as lately; drafts bring a share of that, misses and hits
        apart, as when they were seen last. A slot of few rounds is like the others. A place that was never seen brings less than the
        one before it, as that one does."""
        all, own = self._all, self._own[:, list(slots)]
        every = all[2:4].sum(axis=0)
        share = all[:2].sum(axis=0) / np.maximum(every, TINY)
        n = self.n_place if every.all() else max(int((every == 0).argmax()), 1)
        if n < self.n_place:
            before = max(float(share[n - 2]), TINY)  # all experts may have been those of earlier rows
            less = float(np.clip(share[n - 1] / before, LEAST, 1.0)) if n > 1 else 1.0
            share[n:] = share[n - 1] * less ** np.arange(1, self.n_place - n + 1)
        some = FEW * every + TINY
        like = (all[:2] + some * share) / (all[2:4] + some)
        usual = all[:2, :1] / max(float(all[4, 0]), TINY)
        first = (own[:2, :, 0] + COUNTS * usual) / (own[4, :, 0] + COUNTS)
        few = COUNTS * first[..., None] + TINY
        shares = (own[:2] + few * like[:, None]) / (own[2:4] + few)
        return np.asarray(shares * first[..., None])

    def ms(self, slots: Sequence[int]) -> tuple[Floats, float]:
        """[slot, place - 1]: milliseconds of each draft's row, beside the part by the number of rows; and by how many a round of their first rows is longer than
        a usual round. Zeros while nothing is known."""
        if not self.is_known:
            return np.zeros((len(slots), self.n_place - 1)), 0.0
        misses, hits = self.expected(slots)
        anchors = Brought(float(misses[:, 0].sum()), float(hits[:, 0].sum()))
        own = self.factors.miss_ms * misses + self.factors.hit_ms * hits
        return own[:, 1:], self.factors.beyond(anchors)

    def of_slot(self, slot: int) -> tuple[float, float, float]:
        """Experts of a slot's usual row, the share of them that is missing, and milliseconds of its first draft."""
        if not self.is_known:
            return 0.0, 0.0, 0.0
        misses, hits, *_, n = self._own[:, slot].sum(axis=1).tolist()
        rate = misses / max(misses + hits, TINY)
        return (misses + hits) / max(n, TINY), rate, float(self.ms([slot])[0][:, :1].sum())

    # -- factors ---------------------------------------------------------------------------------------------------

    def learn(self, size: int, brought: Brought, ms: float) -> bool:
        """A round of so many rows (by a timer's bucket) took so long. Whether the factors have changed: then count samples anew."""
        found = np.array([*brought, ms])
        self._n += 1
        self._usual += (found - self._usual) / min(self._n, 1 / (1 - SQUARES))
        if (mean := self._means.get(size)) is None:
            self._means[size] = np.append(found, 1.0)
        else:
            x, y = (found - mean[:3])[:2], float(ms - mean[2])
            far = abs(y - float(x @ np.array(self.factors[:2])))
            weight = min(1.0, FAR * self._off / far) if self._off and far else 1.0
            share = max(1 / (1 + mean[3]), 1 - MEAN)
            mean += np.append(share * weight * (found - mean[:3]), 1.0)
            weight *= 1 - share  # the mean is no surer than that
            self._off += (1 - MEAN) * (min(far, 2 * FAR * self._off) - self._off) if self._off else far
            self._squares = SQUARES * self._squares + weight * np.outer(x, x)
            self._with_ms = SQUARES * self._with_ms + weight * y * x
        return self._n % REFIT == 0 and self._fit()

    def _fit(self) -> bool:
        misses, hits, ms = self._usual.tolist()
        each = ms / np.maximum([misses, hits], 0.05 * (misses + hits) + 1e-9)
        believed = np.array([PRIOR, 0.0]) * each
        doubt = np.diag((max(self._off, 1e-3 * ms) / (np.array([PRIOR, DOUBT]) * each)) ** 2)
        miss_ms, hit_ms = np.linalg.solve(self._squares + doubt, self._with_ms + doubt @ believed)
        made = Factors(
            min(max(miss_ms, 0.0), each[0]), min(max(hit_ms, 0.0), each[1]), Brought(misses, hits)
        )
        old = self.factors
        shift = abs(made.miss_ms - old.miss_ms) * misses + abs(made.hit_ms - old.hit_ms) * hits
        if shift <= CHANGE * ms and abs(made.beyond(old.usual)) <= 10 * CHANGE * ms:
            return False
        self.factors = made
        return True
