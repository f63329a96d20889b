"""Which experts stay on the card: swaps by recent use, against the best fixed set, in routing that stays, drifts, or has no favourites."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pyspec.engine.policy.residents import Residents, UseCounts, swaps
from pyspec.models.placement import Swap

N_LAYER, N_EXPERT, N_USED, N_SLOT = 3, 64, 4, 24
BYTES = [7, 5, 7]
Route = Callable[[], list[np.ndarray]]


def routing(
    zipf: float, drifts_every: int = 0, seed: int = 5
) -> Iterator[tuple[list[np.ndarray], float]]:
    """Keys that a round uses, by layer, and the share of them that the best fixed set of the time would have."""
    rng = np.random.default_rng(seed)
    weight = -zipf * np.log(np.arange(1, N_EXPERT + 1))
    order = [rng.permutation(N_EXPERT) for _ in range(N_LAYER)]
    n = 0
    while True:
        n += 1
        if drifts_every and n % drifts_every == 0:
            order = [rng.permutation(N_EXPERT) for _ in range(N_LAYER)]
        ranks = [np.argsort(-(weight + rng.gumbel(size=N_EXPERT)))[:N_USED] for _ in range(N_LAYER)]
        best = float(np.mean([(of_layer < N_SLOT).mean() for of_layer in ranks]))
        yield [np.sort(order[i][own]) + i * N_EXPERT for i, own in enumerate(ranks)], best


def residents() -> Residents:
    firsts = np.arange(N_LAYER + 1) * N_EXPERT
    return Residents(firsts, [np.arange(N_SLOT) + first for first in firsts[:-1]], BYTES)


def replayed(
    n_round: int, room: int, pays: float, zipf: float, drifts_every: int = 0
) -> tuple[np.ndarray, np.ndarray, int]:
    """(share of hits, share of the best fixed set) by round, and swaps. Swaps arrive a round later."""
    own, counts, found, n_swap = residents(), UseCounts(N_LAYER * N_EXPERT), [], 0
    coming: list[Swap] = []
    routes = routing(zipf, drifts_every)
    for _ in range(n_round):
        used, best = next(routes)
        keys = np.concatenate(used)
        is_there = own.there[keys]
        found.append((is_there.mean(), best))
        counts.add(keys)
        for swap in coming:
            own.put(swap)
        missed = keys[~own.there[keys]]
        coming = swaps(own, counts, missed, room, pays)
        n_swap += len(coming)
        slots = [(swap.layer, swap.slot) for swap in coming]
        assert len(set(slots)) == len(slots), "a slot changes once in a round"
        assert sum(BYTES[swap.layer] for swap in coming) <= room
        for swap in coming:
            assert own.slots[swap.layer][swap.slot] == swap.leaves and not own.there[swap.key]
            assert swap.key // N_EXPERT == swap.layer == swap.leaves // N_EXPERT
            assert counts[np.array([swap.key])] - counts[np.array([swap.leaves])] > pays
    assert own.there.sum() == N_LAYER * N_SLOT
    assert all(len(set(of.tolist())) == N_SLOT for of in own.slots)
    hits, best = np.array(found).T
    return hits, best, n_swap


@pytest.mark.parametrize(("zipf", "least"), [(0.0, 0.985), (0.7, 0.94), (1.2, 0.97)])
def test_hits_come_near_those_of_the_best_fixed_set(zipf: float, least: float) -> None:
    hits, best, _ = replayed(10_000, 20, 1.75, zipf)
    begin, late = hits[:15].mean(), slice(1000, None)
    assert hits[late].mean() > least * best[late].mean()
    assert zipf == 0 or begin < 0.8 * best.mean(), "it began without them"


def test_hits_come_back_where_texts_drift() -> None:
    every = 500
    hits, best, _ = replayed(10_000, 20, 1.75, 1.2, every)
    phases = hits[every:].reshape(-1, every)
    assert phases[:, :10].mean() < 0.7 * best.mean() < 0.95 * best.mean() < phases[:, 150:].mean()


def test_swaps_are_few_where_they_do_not_pay_and_none_without_room() -> None:
    of = [replayed(2000, 20, pays, 1.2)[2] for pays in (0.5, 2.0, 4.0, 60.0)]
    assert of[0] > 3 * of[1] > 9 * of[2] > of[3] == 0
    assert replayed(500, 4, 0.5, 1.2)[2] == 0


def test_a_layer_without_slots_and_one_with_all_have_no_swaps() -> None:
    firsts = np.array([0, 5, 9])
    own, counts = Residents(firsts, [np.arange(0), np.arange(5, 9)], [1, 1]), UseCounts(9)
    for _ in range(50):
        counts.add(np.arange(9))
        assert swaps(own, counts, np.arange(5), 100, 1.0) == []


def test_counts_decay_prompts_count_little_and_numbers_stay_small() -> None:
    counts, half = UseCounts(4, half_life=10), np.array([0])
    counts.add(half)
    for _ in range(10):
        counts.add(np.array([1]), np.array([2]))
    assert counts[half][0] == pytest.approx(0.5)
    assert counts[np.array([1])][0] == pytest.approx(16 * counts[np.array([2])][0])
    for _ in range(20_000):
        counts.add(np.array([1]))
    most = 1 / (1 - 2**-0.1)
    assert counts.known() == pytest.approx([0, most, 0, 0], abs=0.01)
    other = UseCounts(4, half_life=10)
    other.recall(counts.known())
    assert other.known() == counts.known()
    for bad in ([1.0], [1, 2, 3, -1], [1, 2, 3, float("nan")], [1, 2, 3, 1e9]):
        with pytest.raises(ValueError, match="can not be"):
            other.recall(bad)
