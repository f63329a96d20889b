"""Log probabilities of the prompt's own tokens: the same as in one forward, for any chunks and any drafts beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from engine_rig import FIXTURES, GREEDY, Heard, rig

from pyspec.engine.messages import pack, unpack
from pyspec.engine.process.supervised_request import SupervisedRequest
from pyspec.errors import SlotError
from pyspec.logits import compute_logits
from pyspec.models.target import Out
from pyspec.request import PromptLogprobs, Request, TokenLogprob
from pyspec.slots.batch import Batch

QWEN35 = FIXTURES / "qwen35.gguf"
PROMPT = random.Random(3).choices(range(256), k=150)


def told(heard: Heard) -> list[TokenLogprob]:
    """Entries of all prompt tokens but the first; each is sent once and in order."""
    entries: list[TokenLogprob] = []
    for e in heard.events:
        if isinstance(e, PromptLogprobs):
            assert e.first == 1 + len(entries) and len(e.entries) == len(e.ranks) <= 64
            entries += e.entries
    return entries


@pytest.fixture(scope="module")
def wanted() -> torch.Tensor:
    return torch.from_numpy(compute_logits(QWEN35, PROMPT, device="cpu")).double().log_softmax(-1)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(
    "settings", [{}, {"ubatch": 9, "batch": 9}, {"spec_type": "none"}, {"spec_type": "ngram"}]
)
def test_prompt_tokens_are_as_likely_as_in_one_forward(
    settings: dict[str, object], wanted: torch.Tensor
) -> None:
    r = rig(QWEN35, np=3, page_size=16, **settings)
    plain = r.generate(PROMPT, 12).tokens
    others = [r.submit(PROMPT[i:], 20) for i in (1, 2)]
    asked = r.submit(PROMPT, 12, prompt_logprobs=3)
    r.run()
    assert asked.tokens == plain and all(len(h.tokens) == 20 for h in others)
    assert asked.timings.cache_n == 0, "every row ran"
    entries = told(asked)
    assert [e.token for e in entries] == PROMPT[1:]
    got = torch.tensor([e.logprob for e in entries]).double()
    own = wanted[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None]).squeeze(1)
    assert (got - own).abs().max() < 2e-4
    best = wanted[:-1].amax(-1)
    assert (torch.tensor([e.top[0][1] for e in entries]).double() - best).abs().max() < 2e-4
    assert all(len(e.top) == 3 for e in entries)
    ranks = [n for e in asked.events if isinstance(e, PromptLogprobs) for n in e.ranks]
    assert all((e.top[0][0] == e.token) == (n == 1) for e, n in zip(entries, ranks, strict=True))
    assert not any(isinstance(e, PromptLogprobs) for h in others for e in h.events)
    assert r.generate([*PROMPT, *plain, 1], 2).timings.cache_n == len(PROMPT) + 11, (
        "what it left is as good as any"
    )


def test_two_that_are_scored_at_once_take_turns_and_nothing_need_be_generated() -> None:
    r = rig(QWEN35, np=2, page_size=16)
    heard = [r.submit(PROMPT[: 100 + i], 0, prompt_logprobs=0) for i in range(2)]
    r.run()
    for i, h in enumerate(heard):
        assert [e.token for e in told(h)] == PROMPT[1 : 100 + i]
        assert h.tokens == [] and h.finish == "length" and h.done.n_predicted == 0
    one = r.generate(PROMPT[:1], 0, prompt_logprobs=0)
    assert told(one) == [] and one.finish == "length"


def test_logits_that_are_none_end_the_request_they_belong_to() -> None:
    r = rig(QWEN35, np=2, page_size=16)

    def spoilt(batch: Batch, forward: Callable[[], Out]) -> Out:
        out = forward()
        logits = out.logits.clone()
        logits[3:5] = float("nan")
        return replace(out, logits=logits)

    r.strike(spoilt)
    h = r.submit(PROMPT, 4, prompt_logprobs=1)
    r.run()
    assert isinstance(h.error, SlotError) and "before prompt token" in str(h.error)
    assert len(told(r.generate(PROMPT, 4, prompt_logprobs=1))) == len(PROMPT) - 1


def test_a_second_engine_tells_what_the_first_did_not() -> None:
    entries = tuple(TokenLogprob(i, -float(i), ((i, -1.0),)) for i in range(1, 9))
    whole = PromptLogprobs("a", 1, entries, tuple(range(1, 9)))
    assert unpack(pack(whole)) == whole
    record = SupervisedRequest("a", Request(prompt=(0,) * 9, prompt_logprobs=1), 0, lambda e: None)
    assert record.on_event(replace(whole, entries=entries[:5], ranks=whole.ranks[:5])) is not None
    assert record.on_event(replace(whole, entries=entries[:3], ranks=whole.ranks[:3])) is None
    rest = record.on_event(replace(whole, first=4, entries=entries[3:], ranks=whole.ranks[3:]))
    assert rest == PromptLogprobs("a", 6, entries[5:], (6, 7, 8))


def test_a_resumed_request_scores_its_prompt_and_not_what_was_generated() -> None:
    r = rig(QWEN35, np=1, page_size=16)
    tokens = r.generate(PROMPT, 9).tokens
    h = r.generate(PROMPT, 9, prompt_logprobs=0, resumed=tuple(tokens[:4]))
    assert [e.token for e in told(h)] == PROMPT[1:] and h.tokens == tokens[4:]
    assert h.request.params == GREEDY
