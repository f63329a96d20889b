"""The controller beside experts in host memory, on a simulated machine: the cost of a row depends on the experts that it brings and on how many of
those are on the GPU. Times as measured on an H200 with twelve layers of a 35B-A3B (docs/log, 2026-11-29)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray
from plans import choose

from pyspec.engine.policy.controller import Controller
from pyspec.engine.policy.plan import DraftRows
from pyspec.engine.policy.row_costs import Brought, RoundExperts, RowCosts

N_MAX, N_LAYER, N_USED, N_EXPERT = 5, 12, 8, 256
CARD = {1: 0.709, 4: 0.824, 8: 1.139, 48: 3.0}  # ms by rows, all on the GPU
MISS_MS, HIT_MS, LAYER_MS = 0.0211, 0.0006, 0.010  # of an expert, and of a layer that has to ask
DRAFT_MS = 0.15 + 0.12 * CARD[1]  # of each pass
LEAST_GAIN = 1.1  # of the best length, below which finding out costs more than it gives
SHARED = 0.72  # experts of a row that the rows before it in its text have not


@dataclass
class Lane:
    """Rounds of a model whose experts are in host memory. hits: share of experts on the GPU, by slot and round; fixed: always so many drafts;
    blind: the controller does not know of experts"""

    n_slot: int
    chance: float
    hits: Callable[[int, int], float]
    fixed: int | None = None
    blind: bool = False
    noise: float = 0.05
    chained: bool = True
    seed: int = 7
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng, self.draw = random.Random(self.seed), np.random.default_rng(self.seed)
        self.c = Controller(self.n_slot, N_MAX, chained=self.chained)
        self.n_round, self.drafted = 0, np.zeros(self.n_slot)
        self.ms = self.tokens = 0.0
        for busy in {1, self.n_slot}:  # the warm-up
            for n in (0, N_MAX // 2, N_MAX):
                self.c.force = busy, n
                for _ in range(4):
                    self.round(busy)
        self.c.forget_acceptance()

    def shares(
        self, picked: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Slot and place of each row, and the share of its experts that no row before it has had."""
        places = [(j, s) for j in range(1 + max(picked)) for s, n in enumerate(picked) if j <= n]
        place, slot = (np.array(column) for column in zip(*places, strict=True))
        others = np.arange(len(place)) - place  # rows of other texts, about
        return slot, place, SHARED**place * (1 - N_USED / N_EXPERT) ** others

    def experts(self, picked: Sequence[int]) -> RoundExperts:
        slot, place, share = self.shares(picked)
        new = self.draw.binomial(N_LAYER * N_USED, share)
        hits = self.draw.binomial(new, np.array([self.hits(int(s), self.n_round) for s in slot]))
        return RoundExperts(slot, place, (new - hits).astype(float), hits.astype(float))

    def verify_ms(self, n_row: int, misses: float, hits: float) -> float:
        of_card = float(np.interp(n_row, list(CARD), list(CARD.values())))
        return of_card + MISS_MS * misses + HIT_MS * hits + LAYER_MS * N_LAYER * (misses > 0)

    def round(self, busy: int) -> None:
        picked = [self.fixed or 0] * busy
        if self.fixed is None:
            picked = choose(self.c, [(slot, N_MAX) for slot in range(busy)])
        self.drafted[:busy] += picked
        of, n_row, live = self.experts(picked), busy + sum(picked), sum(n > 0 for n in picked)
        verify = self.verify_ms(n_row, *of.sum)
        verify *= 1 + self.noise * self.rng.expovariate(3)
        draft = (
            DRAFT_MS * (max(picked) if self.chained else live > 0) * (1 + self.noise * self.rng.random())
        )
        for slot, n in enumerate(picked):
            k = next((i for i in range(n) if self.rng.random() >= self.chance), n)
            self.tokens += 1 + k
            if self.fixed is None:
                self.c.record(slot, n, k)
        if self.fixed is None:
            self.c.timed(n_row, verify, live, max(picked), draft, None if self.blind else of)
        self.ms, self.n_round = self.ms + verify + draft, self.n_round + 1

    def run(self, n_round: int) -> float:
        """Tokens a millisecond."""
        self.ms = self.tokens = 0.0
        for _ in range(n_round):
            self.round(self.n_slot)
        return self.tokens / self.ms


def fixed_rates(n_slot: int, chance: float, hits: float) -> list[float]:
    """Tokens a millisecond of each fixed length, in the mean."""
    found = []
    for n in range(1 + N_MAX):
        lane = Lane(n_slot, chance, lambda *_: hits, fixed=n)
        new = N_LAYER * N_USED * lane.shares([n] * n_slot)[2].sum()
        ms = float(lane.verify_ms(n_slot * (1 + n), new * (1 - hits), new * hits)) * (1 + lane.noise / 3)
        ms += DRAFT_MS * n * (1 + lane.noise / 2)
        found.append(n_slot * sum(chance**i for i in range(1 + n)) / ms)
    return found


EASY = [(1, 0.0, 0.0), (1, 0.9, 0.95), (7, 0.3, 0.75), (7, 0.9, 0.0)]
ALL = [(n, p, h) for n in (1, 7, 8) for p in (0.0, 0.3, 0.7, 0.9) for h in (0.0, 0.5, 0.75, 0.95)]


@pytest.mark.parametrize(
    ("n_slot", "chance", "hits"),
    [*EASY, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in EASY)],
)
def test_drafts_never_cost_two_percent_and_come_near_the_best_length(
    n_slot: int, chance: float, hits: float
) -> None:
    rates = fixed_rates(n_slot, chance, hits)
    lane = Lane(n_slot, chance, lambda *_: hits)
    first, got = lane.run(250 + 500 // n_slot), lane.run(250 + 500 // n_slot)
    assert min(first, got) > 0.98 * rates[0], (
        f"{first / rates[0]:.3f}, then {got / rates[0]:.3f} of plain"
    )
    if max(rates) > LEAST_GAIN * rates[0]:
        assert got > 0.97 * max(rates), f"{got / max(rates):.3f} of always {rates.index(max(rates))}"


def test_factors_are_those_of_the_machine_though_it_is_busy_and_changes() -> None:
    lane = Lane(1, 0.7, lambda _, i: 0.5 + 0.4 * ((i // 60) % 2), noise=0.3)
    lane.run(400)
    miss_ms, hit_ms, _ = lane.c.rows.factors
    assert miss_ms == pytest.approx(MISS_MS, rel=0.25) and 0 <= hit_ms < 0.3 * MISS_MS
    experts, misses, row_ms = lane.c.rows.of_slot(0)
    assert N_LAYER * N_USED * 0.6 < experts <= N_LAYER * N_USED and 0.0 < misses < 0.6 and row_ms > 0


def test_a_cache_that_warms_up_is_noticed_at_once() -> None:
    """No draft pays while all experts are missing; as soon as they are there, drafts are tried and taken, and the other way round."""

    def hits(_: int, i: int) -> float:
        return 0.95 if (i // 120) % 2 else 0.0

    got, blind = (Lane(1, 0.6, hits, blind=blind).run(960) for blind in (False, True))
    plain = Lane(1, 0.6, hits, fixed=0).run(960)
    assert got > 0.98 * plain and got > blind, f"{got / plain:.3f}, {blind / plain:.3f}"


def test_slots_whose_experts_are_there_get_the_drafts() -> None:
    """All texts are alike, but half of them have their experts on the GPU."""
    lane = Lane(8, 0.6, lambda slot, _: 0.97 if slot % 2 else 0.0)
    lane.run(250)
    lane.drafted[:] = 0
    lane.run(100)
    warm, cold = lane.drafted[1::2].mean(), lane.drafted[::2].mean()
    assert warm > 1.5 * cold, (warm, cold)


def test_rows_are_ordered_by_what_they_bring_and_prefixes_stay_whole() -> None:
    gain = np.array([[0.9, 0.8, 0.7], [0.9, 0.5, 0.4]])
    ms = np.array([[4.0, 0.1, 0.1], [1.0, 1.0, 1.0]])
    rows = DraftRows.sorted(gain > 0, gain, ms, 0.2)
    assert rows.slot.tolist() == [1, 1, 1, 0, 0, 0] and rows.place.tolist() == [0, 1, 2] * 2
    best = rows.best(2, np.full(6, 10.0))
    assert best.slot.tolist() == [1, 1, 1, 0, 0, 0] and best.ms == pytest.approx(17.2)
    alike = DraftRows.sorted(gain > 0, gain, np.zeros_like(gain), 0.2)
    assert alike.slot.tolist() == [0, 1, 0, 0, 1, 1]


def test_a_place_that_nobody_saw_brings_less_than_the_one_before() -> None:
    rows = RowCosts(3, 5)
    assert rows.ms([0, 2])[0].shape == (2, 4) and not rows.ms([0, 2])[0].any()
    for _ in range(40):
        rows.see(RoundExperts.of([0, 2], [[80, 40], [8]], [[0, 0], [72]], Brought(128, 72)))
    misses, _ = rows.expected([0, 2])
    assert misses[0, :2] == pytest.approx([80, 40], rel=0.05)
    assert misses[0, 3] < 0.7 * misses[0, 2] < 0.5 * 40
    assert misses[1, 0] == pytest.approx(8, rel=0.5) and misses[1, 1] < 0.25 * misses[0, 1]
    rows.begin(2)
    assert rows.expected([2])[0, 0, 0] == pytest.approx(44, rel=0.05), "as all others do"
    for brought, of_next in (([16, 0, 0], 0.0), ([16, 0, 4], 4.0)):  # all tokens go to the same experts
        rows = RowCosts(1, 5)
        rows.see(RoundExperts.of([0], [brought], [[0, 0, 0]], Brought(sum(brought), 0)))
        assert rows.expected([0])[0, 0, 3:] == pytest.approx([of_next] * 2, abs=1e-6)
    both = RoundExperts.of([4, 1], [[10, 5], [5]], [[0, 0], [0]], Brought(16, 0))
    assert both.misses.tolist() == [8, 4, 4]
    assert both.slot.tolist() == [4, 4, 1]
    assert both.place.tolist() == [0, 1, 0]
