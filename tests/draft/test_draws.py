"""Drafts that are drawn: the cuts of a request, races by the target's numbers, and the distributions of a block's rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from block_drafters import recorded_block
from sampling_reference import distribution

from pyspec.draft.dflash2 import DFlash2Net, check_candidates
from pyspec.draft.draws import Drawing, Draws
from pyspec.draft.dspark import DSparkNet
from pyspec.errors import ConfigError
from pyspec.request import SamplingParams
from pyspec.sample.noise import uniform
from pyspec.slots.drafts import DraftDraw
from pyspec.slots.race import winners

CPU = torch.device("cpu")
OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
N = 24


def draw_of(params: SamplingParams, n: int, *, keeps_q: bool = True, seed: int = 3) -> DraftDraw:
    own = uniform(seed, np.arange(n)).tolist()
    return DraftDraw(params.temperature, params.top_k, params.top_p, params.min_p, own, keeps_q)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.4, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_a_draft_is_drawn_from_the_cut_distribution_of_its_request(changes: dict[str, float]) -> None:
    params = replace(OFF, **changes)
    logits = torch.randn(1, N, generator=torch.Generator().manual_seed(5)) * 2
    want = torch.zeros(N, dtype=torch.float64)
    for token, p in distribution(logits[0].tolist(), params).items():
        want[token] = p
    n = 3000
    draws = Draws([draw_of(params, n)], n, Drawing(N, None, CPU))
    rows = logits.expand(n, -1)
    tokens = draws.block(rows, rows.argmax(-1))
    torch.testing.assert_close(draws.q[0, 7].double(), want, atol=1e-6, rtol=0)
    share = tokens.bincount(minlength=N) / n
    assert bool(((share - want).abs() <= 4.5 * (want * (1 - want) / n).sqrt() + 1e-6).all())


def test_slots_of_one_round_draw_apart_and_greedy_ones_take_the_best() -> None:
    params = replace(OFF, top_k=6, top_p=0.9)
    logits = torch.randn(3, 4, N, generator=torch.Generator().manual_seed(1)) * 2
    rows = logits.view(12, N)
    drawing, best = Drawing(N, None, CPU), rows.argmax(-1)
    asks = [draw_of(params, 4, keeps_q=False), None, draw_of(OFF, 4, keeps_q=False, seed=8)]
    together = Draws(asks, 4, drawing).block(rows, best).view(3, 4)
    assert together[1].tolist() == best.view(3, 4)[1].tolist()
    for i in (0, 2):
        alone = Draws(asks[i : i + 1], 4, drawing).block(logits[i], best.view(3, 4)[i])
        assert alone.tolist() == together[i].tolist()


def test_a_vocabulary_of_its_own_draws_tokens_of_the_target_by_their_numbers() -> None:
    """A third of the tokens in another order, one of them twice: the race is the target's."""
    to_target = torch.tensor([21, 3, 9, 0, 15, 6, 12, 18, 9])
    logits = torch.randn(40, len(to_target), generator=torch.Generator().manual_seed(2))
    draws = Draws([draw_of(OFF, 40)], 40, Drawing.of(N, to_target, CPU))
    tokens = draws.block(logits, to_target[logits.argmax(-1)])
    q = torch.zeros(40, N).index_add_(1, to_target, logits.softmax(-1))
    torch.testing.assert_close(draws.q[0], q)
    of_target = winners(
        q.double().log(), torch.from_numpy(uniform(3, np.arange(40)))[:, None], torch.arange(N)[None]
    )
    assert tokens.tolist() == of_target.tolist()


def test_few_candidates_are_drawn_as_all_are() -> None:
    """By top-k the others are not looked at: the same tokens and probabilities, with a vocabulary of its own, too."""
    params, to_target = replace(OFF, top_k=5, top_p=0.9), torch.arange(N).flip(0)
    logits = torch.randn(40, N, generator=torch.Generator().manual_seed(9)) * 2
    best = to_target[logits.argmax(-1)]
    few, every = (Draws([draw_of(params, 40)], 40, Drawing.of(N, to_target, CPU)) for _ in range(2))
    every.n_best = 0
    assert few.n_best == 5 and few.block(logits, best).tolist() == every.block(logits, best).tolist()
    torch.testing.assert_close(few.q, every.q)


def test_races_by_one_number_agree_about_as_often_as_distributions_can() -> None:
    rng = torch.Generator().manual_seed(4)
    row = torch.randn(1, 400, generator=rng) * 2.5
    other = row + torch.randn(1, 400, generator=rng) * 0.5
    n = 4000
    own, ids = torch.from_numpy(uniform(1, np.arange(n)))[:, None], torch.arange(400)[None]
    p, q = row.softmax(-1), other.softmax(-1)
    agree = (
        (
            winners(row.double().expand(n, -1), own, ids)
            == winners(other.double().expand(n, -1), own, ids)
        )
        .double()
        .mean()
    )
    bound = float(torch.minimum(p, q).sum())
    assert bound / (2 - bound) - 0.02 < float(agree) <= bound + 0.02
    assert float(agree) > float(p[0, q.argmax()]) + 0.1


# -- rows that depend on the draft before -----------------------------------------------------------------------------


def test_a_row_of_dspark_is_drawn_behind_the_token_drawn_before() -> None:
    net, rows, batch, _ = recorded_block("dspark")
    assert isinstance(net, DSparkNet)
    for seed in range(4):
        draws = Draws(
            [draw_of(replace(OFF, temperature=1.5), len(rows), seed=seed)], len(rows), net.drawing
        )
        tokens, _ = net.drafts(rows[None], len(rows), batch.tokens[:1], tells=False, draws=draws)
        given = net.token(torch.cat([batch.tokens[:1], tokens[:-1]]))
        want = (net.bias(given, residual=net.head(rows)) / 1.5).softmax(-1)
        torch.testing.assert_close(draws.q[0], want)
        assert tokens.tolist() == _raced(want, seed)


def test_a_row_of_dflash2_is_drawn_among_its_candidates_behind_the_one_drawn_before() -> None:
    net, rows, batch, _ = recorded_block("dflash2")
    assert isinstance(net, DFlash2Net)
    n, values_of = len(rows) - 1, net._candidates(rows[1:])
    values, ids, gate = values_of
    for seed in range(4):
        draws = Draws([draw_of(replace(OFF, temperature=1.5), n, seed=seed)], n, net.drawing)
        tokens, _ = net.drafts(rows[None], n, batch.tokens[:1], tells=False, draws=draws)
        before = torch.cat([batch.tokens[:1], tokens[:-1]])
        follows = net.behind(ids.flatten()).view(*ids.shape, -1) * (net.before(before) * gate)[:, None]
        chances = ((values + follows.sum(-1)) / 1.5).softmax(-1)
        want = torch.zeros_like(draws.q[0]).scatter_(1, ids, chances)
        torch.testing.assert_close(draws.q[0], want)
        assert tokens.tolist() == _raced(want, seed)


def test_candidates_that_are_one_token_twice_are_not_judged_by_their_probabilities() -> None:
    net, *_ = recorded_block("dflash2")
    assert isinstance(net, DFlash2Net)
    net.drawing = Drawing.of(9, torch.tensor([1, 2, 1]), CPU)
    check_candidates(net, "coupled")
    with pytest.raises(ConfigError, match="d2t has a token twice; coupled can"):
        check_candidates(net, "probabilistic")


def _raced(p: torch.Tensor, seed: int) -> list[int]:
    noise = torch.from_numpy(uniform(seed, np.arange(len(p))))[:, None]
    return winners(p.double().log(), noise, torch.arange(p.shape[1])[None]).tolist()
