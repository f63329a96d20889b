"""The controller's loss against an oracle that knows acceptance and costs: some cells of tools/regret.py."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from regret import CARDS, LEVELS, Seer, Served, Text, cell, oracle, plain, steady


@pytest.mark.slow
@pytest.mark.sampled(most=3)
@pytest.mark.parametrize("streams", [1, 8, 32, 64])
@pytest.mark.parametrize("text", ["code", "chat", "mixed", "low"])
def test_mtp_of_a_dense_model_loses_little(text: str, streams: int) -> None:
    found = cell("27b-mtp", text, streams, 500, range(1))
    assert found.regret < 0.035 and found.of_plain > 0.98


def test_the_oracle_drafts_nothing_that_does_not_pay_and_all_that_does() -> None:
    card, caps = CARDS["27b-mtp"], [(slot, 3) for slot in range(4)]
    pick = oracle(card)
    assert pick(caps, np.full((4, 3), 0.02)) == [0] * 4
    assert pick(caps, np.full((4, 3), 0.99)) == [3] * 4
    assert pick([(0, 3), (1, 0)], np.full((2, 3), 0.99))[1] == 0


def test_texts_are_the_same_whoever_decides() -> None:
    card = CARDS["27b-mtp"]
    runs = [Served(card, "mixed", steady(2), 2, 0, pick) for pick in (plain, oracle(card))]
    for run in runs:
        run.seat(2)
    a, b = (run.seats[1].text for run in runs)
    assert a.n == b.n and np.array_equal(a.coins, b.coins) and np.array_equal(a.chances, b.chances)


def test_a_texts_chance_is_how_often_it_is_right() -> None:
    texts = [Text("low", 3, np.random.default_rng(seed)) for seed in range(30)]
    right = [text.n_right(at, 1) for text in texts for at in range(text.n)]
    assert abs(sum(right) / len(right) - LEVELS["low"]) < 0.03


def test_who_reads_every_token_loses_little_and_learns_what_a_text_is_like() -> None:
    card = CARDS["27b-mtp"]
    seer = Seer(card, "mixed")
    assert seer([(0, 3)], np.zeros((1, 3))) == [3], "most texts are easy"
    for _ in range(30):
        seer.saw(0, [False])
    assert seer([(0, 3)], np.zeros((1, 3)))[0] < 3
    best, own = (
        Served(card, "mixed", steady(4), 8, 0, pick).run(300)
        for pick in (oracle(card), Seer(card, "mixed"))
    )
    assert 0.97 * best < own < 1.01 * best


def test_a_second_start_loses_less_where_the_warm_up_was_wrong() -> None:
    """Hardly any draft is right, and drafts take three times what a warm-up of short texts says: a first start drafts until it knows."""
    card = CARDS["27b-mtp"]
    slow = replace(card, draft={rows: 3 * ms for rows, ms in card.draft.items()})

    def start(seed: int, n: int, before: Served | None) -> Served:
        s = Served(card, "low", steady(8), 64, seed)
        s.card = slow
        c = s.controller
        if before is not None:
            b = before.controller
            c.texts.recall({name: np.array(values) for name, values in b.texts.known().items()})
            c.costs.verify.recall(b.costs.verify.known())
            c.costs.draft.recall(b.costs.draft.known())
        s.run(n)
        return s

    of_plain, n_draft = [], []
    for before in (None, start(1, 500, None)):
        found = [start(seed, 60, before) for seed in (4, 5, 6, 7)]
        base = [Served(slow, "low", steady(8), 64, seed, plain).run(60) for seed in (4, 5, 6, 7)]
        of_plain.append(np.mean([s.tokens / s.ms / p for s, p in zip(found, base, strict=True)]))
        n_draft.append(sum(sum(map(sum, s.picks)) for s in found))
    assert 1 - of_plain[1] < 0.7 * (1 - of_plain[0]) and n_draft[1] < 0.9 * n_draft[0]
