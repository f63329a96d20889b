"""Samplers in any order, and those that look beyond the row: llama.cpp's values, the fast chain's choices, the same text with drafts.

llama_cpp_steps.json has results of llama.cpp's own samplers (llama_sampler_apply of October 2026): `steps` one sampler on one row, `runs` those
with a memory, on successive rows with their chosen tokens.
"""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from sampling import few

from pyspec.request import DEFAULT_SAMPLERS, SamplingParams
from pyspec.sample.choose import Span, choose
from pyspec.sample.feedback import Feedback
from pyspec.sample.sampler import SlotSampler
from pyspec.sample.stepwise import RowInputs, choose_row
from pyspec.slots.drafts import Drafts

KNOWN = json.loads((Path(__file__).parent / "llama_cpp_steps.json").read_text())
ROWS = [torch.tensor(row) for row in KNOWN["rows"]]
NOTHING = np.zeros(0, np.int64), np.zeros(0, np.float32)
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def at(params: SamplingParams, feedback: Feedback, draw: float = 0.5) -> RowInputs:
    return RowInputs(params, draw, 0.5, NOTHING, NOTHING, feedback)


def probabilities(left) -> dict[int, float]:
    return {i: p for i, p in zip(left.ids.tolist(), left.probs().tolist(), strict=True) if p > 1e-6}


@pytest.mark.parametrize(
    "case", KNOWN["steps"], ids=lambda c: f"row{c['row']}-{'-'.join(map(str, c['params'].values()))}"
)
def test_a_step_leaves_the_probabilities_llama_cpp_leaves(case):
    params = SamplingParams(**(OFF | case["params"] | {"samplers": tuple(case["params"]["samplers"])}))
    _, _, left = choose_row(ROWS[case["row"]], at(params, Feedback.first(params)))
    expected = {i: p for i, p in case["probs"] if p > 1e-6}
    found = probabilities(left)
    assert found.keys() == expected.keys()
    assert [found[i] for i in expected] == pytest.approx(list(expected.values()), rel=2e-5)


@pytest.mark.parametrize("run", KNOWN["runs"], ids=lambda r: "-".join(map(str, r["params"].values())))
def test_what_adaptive_samplers_remember_is_llama_cpp_s(run):
    """Finds a number that draws llama.cpp's token, so that the memory is of the same tokens."""
    params = SamplingParams(**(OFF | run["params"]))
    feedback = Feedback.first(params)
    for row, token, probs in zip(run["rows"], run["chosen"], run["probs"], strict=True):
        _, _, left = choose_row(ROWS[row], at(params, feedback))
        expected, found = {i: p for i, p in probs if p > 1e-5}, probabilities(left)
        assert found.keys() >= expected.keys()
        assert [found[i] for i in expected] == pytest.approx(list(expected.values()), rel=1e-3)
        draw = sum(p for i, p in found.items() if i < token) + 0.5 * found[token]
        chosen, feedback, _ = choose_row(ROWS[row], at(params, feedback, draw))
        assert chosen == token


FAST = [
    {},
    {"top_k": 0, "top_p": 0.9, "min_p": 0.0},
    {"top_k": 12, "typical_p": 0.7},
    {"temperature": 0.4, "min_p": 0.2, "min_keep": 3},
    {"repeat_penalty": 1.3, "frequency_penalty": 0.4, "dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"logit_bias": ((3, 2.0), (5, float("-inf"))), "top_p": 0.8},
]


def spans(params: SamplingParams, drafts: list[list[int]]) -> list[Span]:
    samplers = [SlotSampler(params, 96, (95,), (1, 2, 3, 1, 2, 3, 1)) for _ in drafts]
    return [
        Span(s, 4 * i, len(d) + 1, Drafts(d))
        for i, (s, d) in enumerate(zip(samplers, drafts, strict=True))
    ]


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("settings", FAST, ids=lambda s: "-".join(s) or "defaults")
def test_the_usual_order_step_by_step_chooses_what_the_fast_chain_chooses(settings):
    logits = torch.randn(4 * 40, 96, generator=torch.Generator().manual_seed(1)) * 3
    for seed in range(4):
        fast = SamplingParams(**{"dry_sequence_breakers": (), "seed": seed, **settings})
        slow = SamplingParams(
            **{"dry_sequence_breakers": (), "seed": seed, "samplers": DEFAULT_SAMPLERS, **settings}
        )
        assert not fast.is_stepwise
        assert slow.is_stepwise
        drafts = [[int(logits[4 * i + j].argmax()) for j in range(i % 4)] for i in range(40)]
        a, b = choose(logits, spans(fast, drafts)), choose(logits, spans(slow, drafts))
        assert [c.tokens for c in a] == [c.tokens for c in b]


STEPWISE = {
    "order": {"samplers": ("temperature", "min_p", "penalties", "top_k"), "min_p": 0.1, "repeat_penalty": 1.5, "temperature": 2.0},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.15},
    "sigma": {"top_n_sigma": 0.8},
    "dynatemp": {"dynatemp_range": 0.7, "temperature": 0.8},
    "mirostat": {"mirostat": 1, "mirostat_tau": 2.0, "mirostat_eta": 0.4},
    "mirostat2": {"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.4},
    "adaptive": {"adaptive_target": 0.2, "adaptive_decay": 0.8},
    "adaptive-order": {"adaptive_target": 0.4, "samplers": ("top_k", "adaptive_p"), "top_k": 10},
    "min-tokens": {"min_tokens": 6, "logit_bias": ((7, 6.0),)},
    "post": {"post_sampling": True, "logprobs": 3},
}  # fmt: skip


def model(history: list[int]) -> list[float]:
    noise = random.Random(history[-1] * 131 + history[-2])
    return [noise.gauss(0.0, 1.6) for _ in range(24)]


def text(params: SamplingParams, drafting: str, n: int = 24) -> tuple[list[int], list]:
    """Tokens and their reports; drafts are right about half of the time, and of another length each round."""
    sampler, told, tokens = SlotSampler(params, 24, (7,), (1, 4)), [], [1, 4]
    dice = random.Random(params.seed)
    while len(tokens) < n + 2 and 7 not in tokens[2:]:
        n_draft = 0 if drafting == "none" else dice.randrange(5)
        drafts: list[int] = []
        for _ in range(n_draft):
            row = model([*tokens, *drafts])
            drafts.append(dice.choice([max(range(24), key=row.__getitem__), dice.randrange(24)]))
        rows = torch.tensor([model([*tokens, *drafts[:i]]) for i in range(n_draft + 1)])
        (chosen,) = choose(rows, [Span(sampler, 0, n_draft + 1, Drafts(drafts))])
        assert chosen.error is None
        kept = chosen.tokens[: max(1, dice.randrange(6))]  # a caller may cut
        sampler.commit(kept)
        tokens += kept
        told += (chosen.logprobs or [])[: len(kept)]
    return tokens[2 : n + 2], told[:n]


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("name", STEPWISE)
def test_the_text_is_the_same_with_drafts_and_without(name):
    ends = 0
    for seed in range(12):
        params = SamplingParams(**{**OFF, "seed": seed, **STEPWISE[name]})
        plain, told = text(params, "none")
        drafted, told_too = text(params, "some")
        n = min(len(plain), len(drafted))
        assert n >= params.min_tokens
        assert plain[:n] == drafted[:n]
        assert told[:n] == told_too[:n]
        assert 7 not in plain[: params.min_tokens]
        ends += 7 in plain
    assert ends or name != "min-tokens"


def test_probabilities_after_sampling_are_those_that_were_drawn_from():
    params = SamplingParams(**{**OFF, "seed": 3, "top_k": 4, "post_sampling": True, "logprobs": 10})
    _, told = text(params, "some")
    for entry in told:
        assert len(entry.top) <= 4
        assert sum(np.exp([p for _, p in entry.top])) == pytest.approx(1.0)
        assert dict(entry.top)[entry.token] == entry.logprob


@pytest.mark.parametrize("name", few(["xtc", "dynatemp", "sigma"]))
def test_temperature_zero_stays_the_argmax(name):
    params = SamplingParams(**{**OFF, **STEPWISE[name], "temperature": 0.0, "dynatemp_range": 0.0})
    logits = torch.tensor([model([3, 5]), model([5, 3])])
    assert params.greedy
    sampler = SlotSampler(params, 24, (), (1,))
    assert choose(logits, [Span(sampler, 0, 1)])[0].tokens == [int(logits[0].argmax())]
