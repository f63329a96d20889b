"""Speculation does not change the distribution of the text.

The "model" is a fixed table from the last two tokens to logits over 12 tokens, so the exact distribution of three-token
continuations can be enumerated with the slow reference. Speculative runs with good, bad and clairvoyant drafts are held
against it by chi-square, at the 0.1 % level, with fixed seeds: the verdict never changes from run to run. So are drafters that draw:
"chain" knows the token before (MTP, EAGLE-3, models, DSpark), "block" knows none of its own (DFlash), and "chosen" knows it and draws among
few candidates (DFlash2).
"""

import random
from collections import Counter
from functools import cache

import pytest
import torch
from sampling import few
from sampling_reference import distribution, edited

from pyspec.draft.draws import Drawing, Draws
from pyspec.request import SamplingParams
from pyspec.sample.choose import Span, choose
from pyspec.sample.draft_draws import draft_draw
from pyspec.sample.noise import uniform
from pyspec.sample.sampler import SlotSampler
from pyspec.slots.drafts import Drafts

FORMS = ("chain", "block", "chosen")
N_VOCAB, N_TOKENS, N_RUNS = 12, 3, 1200
EOG = (11,)
PROMPT = (1, 4, 5, 6, 1, 4, 5)

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "dry_sequence_breakers": ()}
SAMPLERS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "typical": {"typical_p": 0.7},
    "bias": {"logit_bias": ((2, 2.0), (7, -1.5))},
    "penalties": {"repeat_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.5, "repeat_last_n": 5},
    "dry": {"dry_multiplier": 1.2, "dry_allowed_length": 1},
    "defaults": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "everything": {
        "temperature": 1.3,
        "top_k": 9,
        "top_p": 0.93,
        "min_p": 0.02,
        "typical_p": 0.95,
        "repeat_penalty": 1.2,
        "dry_multiplier": 0.7,
        "logit_bias": ((3, 1.0),),
        "ignore_eos": True,
    },
}  # fmt: skip


@cache
def model(before: tuple[int, int]) -> tuple[float, ...]:
    noise = random.Random(before[0] * 100 + before[1])
    return tuple(torch.tensor([noise.gauss(0.0, 1.6) for _ in range(N_VOCAB)]).tolist())


def exact(params: SamplingParams, tokens: tuple[int, ...] = ()) -> dict[tuple[int, ...], float]:
    """Probability of every continuation; one that ends early holds an end token last."""
    if len(tokens) == N_TOKENS or (tokens and tokens[-1] in EOG):
        return {tokens: 1.0}
    history = (*PROMPT, *tokens)
    out: dict[tuple[int, ...], float] = {}
    for token, p in distribution(edited(model(history[-2:]), params, history, EOG), params).items():
        for end, q in exact(params, (*tokens, token)).items():
            out[end] = p * q
    return out


def draft(kind: str, history: tuple[int, ...], n: int, run: int) -> list[int]:
    """Good: the model's favourites. Bad: its least likely. Clairvoyant: knows the draw, and lies every other time."""
    out: list[int] = []
    for _ in range(n):
        row = model((*history, *out)[-2:])
        order = sorted(range(N_VOCAB), key=lambda i: row[i])
        if kind == "clairvoyant":
            u = uniform(run, torch.tensor([len(history) + len(out)]).numpy())[0]
            p = torch.tensor(row).softmax(-1).cumsum(-1)
            drawn = min(int((p <= u).sum()), N_VOCAB - 1)
            out.append(drawn if run % 2 else order[-1] if drawn == order[0] else order[0])
        else:
            out.append(order[-1] if kind == "good" else order[0])
    return out


def guess(before: tuple[int, int]) -> list[float]:
    """A drafter's logits: the model's, and some more noise."""
    noise = random.Random(7 + before[0] * 100 + before[1])
    return [x + noise.gauss(0.0, 0.8) for x in model(before)]


def drawn(
    kind: str, samplers: list[SlotSampler], histories: list[tuple[int, ...]], n_drafts: list[int]
) -> list[Drafts]:
    """Drafts of a drafter that draws."""
    form, how = kind.split()
    found: list[list[int]] = [[] for _ in samplers]
    asks = [draft_draw(sampler, how, 3) for sampler in samplers]
    draws = Draws(asks, 3, Drawing(N_VOCAB, None, torch.device("cpu")))
    for at in range(3):
        known = found if form != "block" else [[]] * len(found)
        befores = [(*history, *own)[-2:] for history, own in zip(histories, known, strict=True)]
        rows = torch.tensor([guess(before) for before in befores])
        if form == "chosen":
            values, ids = rows.topk(6)
            tokens = ids.gather(1, draws.take_among(at, values, ids)[:, None])[:, 0]
        else:
            tokens = draws.take(at, rows, rows.argmax(-1))
        for own, token in zip(found, tokens.tolist(), strict=True):
            own.append(token)
    return [
        Drafts(own[:n], draws.q[i, :n] if draws.keeps_q and n else None)
        for i, (own, n) in enumerate(zip(found, n_drafts, strict=True))
    ]


def continuations(
    params: SamplingParams, kind: str, first_seed: int, *, races: bool = False
) -> tuple[list[tuple[int, ...]], int]:
    """One continuation per seed, all runs side by side as slots of the same rounds; and how many drafts were accepted."""
    settings = [SamplingParams(**{**_fields(params), "seed": first_seed + run}) for run in range(N_RUNS)]
    samplers = [SlotSampler(p, N_VOCAB, EOG, PROMPT) for p in settings]
    for sampler in samplers:
        sampler.races = races or " " in kind
    texts: list[tuple[int, ...]] = [()] * N_RUNS
    busy, n_accepted = list(range(N_RUNS)), 0
    while busy:
        spans, rows = [], []
        histories = [(*PROMPT, *texts[run]) for run in busy]
        lengths = [0 if kind == "none" else (run + len(texts[run])) % 4 for run in busy]
        if " " in kind:
            found = drawn(kind, [samplers[run] for run in busy], histories, lengths)
        else:
            found = [
                Drafts(draft(kind, history, n, first_seed + run))
                for run, history, n in zip(busy, histories, lengths, strict=True)
            ]
        for run, history, drafts in zip(busy, histories, found, strict=True):
            n_draft = len(drafts.tokens)
            spans.append(Span(samplers[run], len(rows), n_draft + 1, drafts))
            rows += [model((*history, *drafts.tokens[:i])[-2:]) for i in range(n_draft + 1)]
        for run, chosen in zip(busy, choose(torch.tensor(rows), spans), strict=True):
            samplers[run].commit(chosen.tokens)
            texts[run] = (*texts[run], *chosen.tokens)[:N_TOKENS]
            n_accepted += chosen.n_accepted
        busy = [run for run in busy if len(texts[run]) < N_TOKENS and texts[run][-1] not in EOG]
    return texts, n_accepted


def _fields(params: SamplingParams) -> dict:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def chi_square(
    texts: list[tuple[int, ...]], expected: dict[tuple[int, ...], float]
) -> tuple[float, float]:
    """Pearson's statistic and its 0.1 % critical value (Wilson and Hilferty 1931). Cells below 5 are pooled."""
    counts = Counter(texts)
    assert set(counts) <= set(expected), "a text that cannot happen"
    cells: list[tuple[float, float]] = []
    seen = mean = 0.0
    for text in sorted(expected, key=lambda t: expected[t]):
        seen, mean = seen + counts[text], mean + expected[text] * len(texts)
        if mean >= 5:
            cells.append((seen, mean))
            seen = mean = 0.0
    cells[-1] = (cells[-1][0] + seen, cells[-1][1] + mean)
    n_free = len(cells) - 1
    spread = 2 / (9 * n_free)
    return sum((s - m) ** 2 / m for s, m in cells), n_free * (1 - spread + 3.0902 * spread**0.5) ** 3


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("name", few(SAMPLERS, "plain", "penalties", "everything"))
def test_speculative_text_has_the_exact_distribution(name):
    params = SamplingParams(**{**OFF, **SAMPLERS[name]})
    expected = exact(params)
    assert sum(expected.values()) == pytest.approx(1.0)
    for i, kind in enumerate(("good", "bad", "clairvoyant")):
        texts, n_accepted = continuations(params, kind, first_seed=1 + 10_000 * i)
        statistic, critical = chi_square(texts, expected)
        assert statistic < critical, f"{kind} drafts"
        assert n_accepted > 100 or kind == "bad", "the drafts must matter for the test to mean anything"


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("form", FORMS)
def test_text_with_drafts_of_known_probability_has_the_exact_distribution(form, name):
    params = SamplingParams(**{**OFF, **SAMPLERS[name]})
    texts, n_accepted = continuations(params, f"{form} probabilistic", first_seed=31)
    statistic, critical = chi_square(texts, exact(params))
    assert statistic < critical
    assert n_accepted > 100


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("form", FORMS)
def test_a_seed_that_races_has_its_text_with_draws_by_its_numbers(form, name):
    params = SamplingParams(**{**OFF, **SAMPLERS[name]})
    plain, _ = continuations(params, "none", first_seed=77, races=True)
    texts, n_accepted = continuations(params, f"{form} coupled", first_seed=77)
    assert texts == plain and n_accepted > 100
    statistic, critical = chi_square(plain, exact(params))
    assert statistic < critical


@pytest.mark.slow
def test_draws_are_accepted_more_often_than_favourites():
    """Coupled draws come near the bound, block verification reaches it and more."""
    params = SamplingParams(**OFF)
    kinds = ("good", "chain coupled", "chain probabilistic")
    good, coupled, probabilistic = (continuations(params, kind, 5)[1] for kind in kinds)
    assert good < coupled < probabilistic


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_run_has_the_text_of_its_seed_whatever_is_drafted(name):
    params = SamplingParams(**{**OFF, **SAMPLERS[name]})
    plain, _ = continuations(params, "none", first_seed=77)
    good, _ = continuations(params, "good", first_seed=77)
    assert good == plain
    assert chi_square(plain, exact(params))[0] < chi_square(plain, exact(params))[1]


def test_the_statistic_notices_a_wrong_distribution():
    """A temperature of 1.25 instead of 1, and drafts that are kept 1 time in 8 without being drawn."""
    params = SamplingParams(**OFF)
    texts, _ = continuations(SamplingParams(**{**OFF, "temperature": 1.25}), "good", first_seed=5)
    statistic, critical = chi_square(texts, exact(params))
    assert statistic > critical
    texts, _ = continuations(params, "good", first_seed=5)
    favourite = tuple(draft("good", PROMPT, N_TOKENS, 0))
    statistic, critical = chi_square(
        [favourite if i % 8 == 0 else t for i, t in enumerate(texts)], exact(params)
    )
    assert statistic > critical
