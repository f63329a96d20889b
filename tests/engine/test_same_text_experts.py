"""Mamba-2 with experts, and Gated DeltaNet with experts: the text of plain single-slot decoding, with any drafts of their MTP blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from draft_fakes import FAKES
from engine_rig import FIXTURES, GREEDY, plain_rig, rig, rig_for
from known_texts import N_TEXT, continuation, known_texts


@pytest.fixture(params=["nemotron_latent", "qwen35moe"])
def model(request: pytest.FixtureRequest) -> Path:
    return FIXTURES / f"{request.param}.gguf"


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("np", [1, 2, 4, 8])
@pytest.mark.parametrize("n_draft", [1, 2, 3])
def test_same_text_with_staggered_joins(model: Path, n_draft: int, np: int) -> None:
    r = rig(model, np=np, ubatch=40, spec_type="mtp", n_draft_max=n_draft, n_draft_fixed=True)
    heard = []
    for prompt in (texts := known_texts(model)):
        heard.append(r.submit(prompt, N_TEXT))
        r.loop.step()
        r.loop.step()
    r.run()
    for h, text in zip(heard, texts.values(), strict=True):
        assert h.tokens == text, f"{h.job.id} in slot {h.slot}"
    assert sum(h.timings.draft_n for h in heard) > 100


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ["liar", "oracle", "fickle"])
def test_same_text_when_none_all_or_some_is_accepted(model: Path, kind: str) -> None:
    r = rig_for(model, FAKES[kind](5, text=partial(continuation, model)), np=3, ubatch=24)
    texts = known_texts(model)
    heard = [r.submit(prompt, N_TEXT) for prompt in texts]
    r.run()
    assert [h.tokens for h in heard] == list(texts.values())
    accepted, drafted = (
        sum(getattr(h.timings, x) for h in heard) for x in ("draft_n_accepted", "draft_n")
    )
    assert {"liar": accepted == 0, "oracle": accepted > 0.9 * drafted, "fickle": 0 < accepted < drafted}[
        kind
    ]


@pytest.mark.slow
@pytest.mark.sampled(most=1)
def test_cancels_and_reused_slots_leave_the_others_their_text(model: Path) -> None:
    r = rig(model, np=3, ubatch=24, spec_type="mtp", n_draft_max=3, n_draft_fixed=True)
    texts = list(known_texts(model).items())
    for rounds in range(5):  # in the queue, in the prompt, while decoding
        kept = [(r.submit(p, N_TEXT), text) for p, text in texts[:2]]
        gone = [r.submit(p, N_TEXT) for p, _ in texts[2:5]]
        for _ in range(rounds):
            r.loop.step()
        for h in gone:
            r.loop.cancel(h.job)
        late, text = r.submit(texts[5][0], 10), texts[5][1]
        r.run()
        assert late.tokens == text[:10] and all(h.tokens == want for h, want in kept)


def test_packed_experts_give_the_same_text(model: Path) -> None:
    prompt, text = next(iter(known_texts(model).items()))
    assert plain_rig(model, weights="packed").generate(prompt, N_TEXT).tokens == text


@pytest.mark.sampled(most=1)
def test_a_seed_gives_its_text_with_drafts_and_without(model: Path) -> None:
    prompt = list(known_texts(model))[1]
    params = replace(GREEDY, temperature=0.8, seed=3)
    want = plain_rig(model).generate(prompt, N_TEXT, params).tokens
    r = rig(model, np=4, spec_type="mtp", n_draft_max=3, n_draft_fixed=True)
    heard = [r.submit(prompt, N_TEXT, params, slot=s) for s in range(4)]
    r.run()
    assert all(h.tokens == want for h in heard)
