"""Drafts that are drawn: cuts of a request, races by the target's numbers, distributions of rows, and the texts of sampled requests."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from block_drafters import DEVICE, dflash2_of, dspark_of, recorded_block
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, GREEDY, Heard, Rig, rig
from known_texts import tiny
from plans import fix_lengths
from sampling import few
from sampling_reference import distribution, edited
from test_eagle3 import eagle
from test_lossless import SAMPLERS, chi_square

from pyspec.draft.dflash2 import DFlash2Net, check_candidates
from pyspec.draft.draws import Drawing, Draws
from pyspec.draft.dspark import DSparkNet
from pyspec.engine.loop import pending_round
from pyspec.errors import ConfigError
from pyspec.gguf import open_gguf
from pyspec.request import Grammar, SamplingParams
from pyspec.sample.choose import Chosen, Span, choose
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


SAMPLED = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, ignore_eos=True)
LLAMA = FIXTURES / "llama.gguf"
FIRST_TEXT = [
    11,
    509,
    314,
    564,
    412,
    33,
    88,
    416,
    353,
    72,
    335,
    11,
    311,
    396,
    1426,
    521,
    461,
    800,
    2885,
    306,
]
SMALL = Grammar(kind="gbnf", source="root ::= [a-z ]{80}")
KINDS = ("dflash", "dflash2", "dspark", "mtp", "draft", "eagle3")


@cache
def pair(kind: str) -> tuple[Path, dict[str, object]]:
    """A target, and settings with a drafter that is sometimes right."""
    n_vocab = open_gguf(DEMO).tensors["token_embd.weight"].shape[0]
    match kind:
        case "dflash":
            return DEMO, {"draft_path": DEMO_DRAFT}
        case "dflash2":
            return DEMO, {"draft_path": dflash2_of(DEMO_DRAFT, n_vocab, quiet=True)}
        case "dspark":
            return DEMO, {"draft_path": dspark_of(DEMO_DRAFT, n_vocab, from_anchor=False)}
        case "mtp":
            return DEMO, {"spec_type": "mtp"}
        case "draft":
            return LLAMA, {"spec_type": "draft", "draft_path": LLAMA}
        case _:
            return tiny("qwen3"), {"draft_path": eagle("qwen3", own=True)}


def drawing(kind: str, how: str, **more: object) -> Rig:
    target, settings = pair(kind)
    given = {"n_draft_fixed": True, "draft_sampling": how, "device": DEVICE}
    return rig(target, **(given | settings | more))


def plain(target: Path, how: str, **more: object) -> Rig:
    """Without drafts."""
    return rig(target, spec_type="none", draft_sampling=how, device=DEVICE, **more)


def texts_of(r: Rig, n_request: int = 6) -> list[Heard]:
    """Every third request is greedy. Joins are staggered, and another request is cancelled."""
    heard, other = [], r.submit([7, 8, 9], 40, SAMPLED)
    for i in range(n_request):
        params = replace(SAMPLED if i % 3 < 2 else GREEDY, seed=50 + i)
        heard.append(r.submit([5 + i, 9, 30 + i, 7, 5 + i], 20, params))
        r.loop.step()
    r.loop.cancel(other.job)
    r.run()
    return heard


@cache
def plain_texts(target: Path, how: str) -> list[list[int]]:
    return [h.tokens for h in texts_of(plain(target, how, np=2))]


@pytest.mark.sampled(1, most=2)
@pytest.mark.parametrize("np_", [1, 3, 10])
@pytest.mark.parametrize("how", ["argmax", "coupled"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_has_its_text_with_drafts_and_without(kind: str, how: str, np_: int) -> None:
    r = drawing(kind, how, np=np_)
    heard = texts_of(r)
    assert [h.tokens for h in heard] == plain_texts(pair(kind)[0], how)
    assert ("; coupled drafts where" in r.info.draft_note) == (how == "coupled")
    assert sum(h.timings.draft_n for h in heard) > 60


@pytest.mark.parametrize("kind", few(KINDS, "dspark", "mtp"))
def test_a_seed_has_its_text_wherever_drafts_are_cut(kind: str) -> None:
    r, rounds = drawing(kind, "coupled", np=3), count()
    fix_lengths(
        r.loop, lambda caps: [cap * (3 * n % 7) // 6 for n in (next(rounds),) for _, cap in caps]
    )
    assert [h.tokens for h in texts_of(r)] == plain_texts(pair(kind)[0], "coupled")


@pytest.mark.skipif(DEVICE != "cpu", reason="another device has other sums")
def test_without_the_option_a_seed_has_the_text_that_it_always_had() -> None:
    """Draws invert the distribution in the order of ids, with the number of seed and position."""
    assert plain_texts(DEMO, "argmax")[0] == FIRST_TEXT != plain_texts(DEMO, "coupled")[0]


def test_a_model_that_drafts_for_itself_is_always_right_if_it_draws_by_the_same_numbers() -> None:
    rates = {}
    for how in ("argmax", "coupled", "probabilistic"):
        heard = [h for i, h in enumerate(texts_of(drawing("draft", how, np=2))) if i % 3 < 2]
        accepted = sum(sum(h.timings.accepted_per_pos) for h in heard)
        rates[how] = accepted / sum(h.timings.draft_n for h in heard)
    assert rates["coupled"] > 0.95 and rates["probabilistic"] > 0.95 and rates["argmax"] < 0.5


@pytest.mark.parametrize("kind", few(KINDS, "eagle3"))
def test_probabilistic_drafts_repeat_a_text_where_lengths_are_fixed(kind: str) -> None:
    found = [[h.tokens for h in texts_of(drawing(kind, "probabilistic", np=2))] for _ in range(2)]
    want = plain_texts(pair(kind)[0], "probabilistic")
    assert found[0] == found[1] != want
    assert [found[0][i] for i in (2, 5)] == [want[i] for i in (2, 5)], "greedy requests keep their text"


@pytest.mark.parametrize("how", ["coupled", "probabilistic"])
def test_requests_with_a_memory_or_a_grammar_keep_the_text_of_a_seed(how: str) -> None:
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"mirostat": 2}, {}),
        ({"samplers": ("temperature", "top_k"), "top_k": 20}, {}),
        ({}, {"grammar": SMALL}),
    ]
    if how == "coupled":
        asked.append(({"repeat_penalty": 1.2, "logit_bias": ((40, 2.0),), "typical_p": 0.9}, {}))
    texts = []
    for r in (plain(DEMO, how, np=2), drawing("dflash", how, np=2)):
        heard = [
            r.submit([5 + i, 9, 7], 20, replace(SAMPLED, seed=i, **changes), **more)
            for i, (changes, more) in enumerate(asked)
        ]
        r.run()
        texts.append([h.tokens for h in heard])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("how", ["coupled", "probabilistic"])
def test_a_drafter_without_probabilities_is_refused(how: str) -> None:
    with pytest.raises(ConfigError, match=f"--spec-draft-sampling {how} needs a drafter with probab"):
        rig(DEMO, spec_type="ngram", draft_sampling=how)
    rig(DEMO, spec_type="suffix", draft_sampling=how)


# -- the distribution of the text -------------------------------------------------------------------------------------

DRAFTERS = [f"{kind} {how}" for kind in KINDS for how in ("coupled", "probabilistic")]
PROMPT, N_TOKENS, N_RUN = (5, 9, 30, 7, 5), 3, 250


def heard_logits(target: Path, texts: Sequence[tuple[int, ...]]) -> list[list[float]]:
    """The target's logits behind each text."""
    found: dict[tuple[int, ...], list[float]] = {}

    def watched(logits: torch.Tensor, spans: Sequence[Span], *of: Any, **more: Any) -> list[Chosen]:
        found.update({tuple(s.sampler.history): logits[s.first_row].tolist() for s in spans})
        return choose(logits, spans, *of, **more)

    with patch.object(pending_round, "choose", watched):
        r = plain(target, "argmax", np=10)
        for text in texts:
            r.submit(text, 1, GREEDY)
        r.run()
    return [found[text] for text in texts]


def exact(target: Path, params: SamplingParams, bans: set[int]) -> dict[tuple[int, ...], float]:
    """Probability of every continuation."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(N_TOKENS):
        histories = [(*PROMPT, *text) for text in found]
        rows = zip(found.items(), heard_logits(target, histories), histories, strict=True)
        found = {
            (*text, token): p * q
            for (text, p), row, history in rows
            for token, q in distribution(_banned(edited(row, params, history), bans), params).items()
        }
    return found


def _banned(row: list[float], bans: set[int]) -> list[float]:
    return [-math.inf if token in bans else value for token, value in enumerate(row)]


def sampled_texts(
    r: Rig, params: SamplingParams, grammar: Grammar | None
) -> tuple[list[tuple[int, ...]], int]:
    given = {"eog": frozenset[int](), "grammar": grammar}
    heard = [r.submit(PROMPT, N_TOKENS, replace(params, seed=900 + i), **given) for i in range(N_RUN)]
    r.run(10**5)
    return [tuple(h.tokens) for h in heard], sum(sum(h.timings.accepted_per_pos) for h in heard)


@pytest.mark.parametrize("name", few(("plain", "top-p", "everything", "grammar"), "plain"))
@pytest.mark.parametrize("drafter", few(DRAFTERS, "dspark probabilistic"))
def test_texts_have_the_targets_distribution(drafter: str, name: str) -> None:
    """Each of the samplers behind top-k, which leaves few texts."""
    kind, how = drafter.split()
    changes: dict[str, Any] = {"temperature": 1.4, **SAMPLERS.get(name, {}), "top_k": 3}
    params = replace(SAMPLED, dry_sequence_breakers=(), **{**changes, "ignore_eos": False})
    r, grammar = drawing(kind, how, np=10), SMALL if name == "grammar" else None
    texts, n_accepted = sampled_texts(r, params, grammar)
    pieces = [r.tokenizer.token_bytes(token) for token in range(r.info.n_vocab)]
    bans = {i for i, piece in enumerate(pieces) if not re.fullmatch(b"[a-z ]+", piece)}
    statistic, critical = chi_square(texts, exact(pair(kind)[0], params, bans if grammar else set()))
    assert statistic < critical
    is_likely = (drafter, name) == (
        "dspark probabilistic",
        "plain",
    )  # of others all drafts may be refused: their weights are random
    assert n_accepted > 20 or not is_likely
