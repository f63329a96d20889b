"""Reasoning cut by its budget: the same text with any drafter, and the forced tokens in their place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from draft_fakes import FAKES
from engine_rig import FIXTURES, GREEDY, plain_rig, rig, rig_for
from known_texts import known_texts

from pyspec.request import SamplingParams, ThinkBudget

QWEN35 = FIXTURES / "qwen35.gguf"
FORCED = (11, 12, 13)
SAMPLED = SamplingParams(seed=3, temperature=0.9, ignore_eos=True)
MIROSTAT = replace(SAMPLED, mirostat=2)
BUDGETS = [
    ThinkBudget(n_tokens=n, start="<think>", end="</never>", is_open=True, forced=FORCED)
    for n in (0, 1, 6, 17)
]
MAKERS = {
    "mtp": lambda np: rig(QWEN35, spec_type="mtp", n_draft_max=4, n_draft_fixed=True, np=np),
    "ngram": lambda np: rig(QWEN35, spec_type="ngram", ngram_match=1, n_draft_fixed=True, np=np),
    "oracle": lambda np: rig_for(
        QWEN35, FAKES["liar"](5, text=lambda tokens, n: [*FORCED, 7][:n]), np=np
    ),
    "none": lambda np: rig(QWEN35, spec_type="none", np=np),
}


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, MIROSTAT], ids=["greedy", "sampled", "mirostat"])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_text_with_a_budget_does_not_depend_on_drafts(
    kind: str, params: SamplingParams, ahead: bool
) -> None:
    prompt = next(iter(known_texts(QWEN35, 1)))
    plain = plain_rig(QWEN35)
    want = []
    for budget in BUDGETS:
        heard = plain.submit(prompt, 30, params, think_budget=budget)
        plain.run()
        want.append(heard.tokens)
        at = heard.tokens.index(FORCED[0], budget.n_tokens)
        assert tuple(heard.tokens[at : at + 3]) == FORCED and at <= budget.n_tokens + 3
    r = MAKERS[kind](4)
    if ahead:
        r.run_ahead(defers=True)
    found = [r.submit(prompt, 30, params, think_budget=budget) for budget in BUDGETS]
    r.run()
    assert [heard.tokens for heard in found] == want


def test_a_budget_goes_on_in_another_engine() -> None:
    prompt, plain = next(iter(known_texts(QWEN35, 1))), plain_rig(QWEN35)
    for budget in BUDGETS[1:3]:
        whole = plain.generate(prompt, 16, SAMPLED, think_budget=budget).tokens
        for cut in range(1, 12):
            heard = plain.generate(prompt, 16, SAMPLED, think_budget=budget, resumed=tuple(whole[:cut]))
            assert whole[:cut] + heard.tokens == whole, f"{budget.n_tokens} tokens, cut at {cut}"
