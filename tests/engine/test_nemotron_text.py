"""Nemotron-H says what plain single-slot decoding says, whatever its MTP block drafts and whoever sits beside."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from draft_fakes import FAKES
from engine_rig import FIXTURES, GREEDY, plain_rig, rig, rig_for
from known_texts import N_TEXT, continuation, known_texts, tiny

from pyspec.request import Started

MODEL = FIXTURES / "nemotron_latent.gguf"


@pytest.mark.parametrize("np", [1, 2, 4, 8])
@pytest.mark.parametrize("n_draft", [1, 2, 3])
def test_same_text_with_staggered_joins(n_draft: int, np: int) -> None:
    r = rig(MODEL, np=np, ubatch=40, spec_type="mtp", n_draft_max=n_draft, n_draft_fixed=True)
    heard = []
    for prompt in (texts := known_texts(MODEL)):
        heard.append(r.submit(prompt, N_TEXT))
        r.loop.step()
        r.loop.step()
    r.run()
    for h, text in zip(heard, texts.values(), strict=True):
        assert h.tokens == text, f"{h.job.id} in slot {h.slot}"
    assert sum(h.timings.draft_n for h in heard) > 100


@pytest.mark.parametrize("np", [1, 2, 4, 8])
def test_same_text_with_n_grams(np: int) -> None:
    r = rig(MODEL, np=np, ubatch=40, spec_type="ngram", ngram_match=1, n_draft_fixed=True)
    texts = known_texts(MODEL)
    heard = [r.submit(prompt, N_TEXT) for prompt in texts]
    r.run()
    assert [h.tokens for h in heard] == list(texts.values())
    assert sum(h.timings.draft_n for h in heard) > 50


@pytest.mark.parametrize("kind", ["liar", "oracle", "fickle"])
def test_same_text_when_none_all_or_some_is_accepted(kind: str) -> None:
    r = rig_for(MODEL, FAKES[kind](5, text=partial(continuation, MODEL)), np=3, ubatch=24)
    texts = known_texts(MODEL)
    heard = [r.submit(prompt, N_TEXT) for prompt in texts]
    r.run()
    assert [h.tokens for h in heard] == list(texts.values())
    accepted, drafted = (sum(getattr(h.timings, x) for h in heard) for x in ("draft_n_accepted", "draft_n"))
    assert {"liar": accepted == 0, "oracle": accepted > 0.9 * drafted, "fickle": 0 < accepted < drafted}[kind]


def test_cancels_and_reused_slots_leave_the_others_their_text() -> None:
    r = rig(MODEL, np=3, ubatch=24, spec_type="mtp", n_draft_max=3, n_draft_fixed=True)
    texts = list(known_texts(MODEL).items())
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


@pytest.mark.parametrize("name", ["nemotron_dense", "nemotron_moe", "nemotron_latent_q8_0"])
def test_other_kinds_give_the_same_text(name: str) -> None:
    """Dense; experts at full width; experts as Q5_0, unpacked where they are used."""
    path = FIXTURES / f"{name}.gguf"
    how = (
        {"spec_type": "ngram", "ngram_match": 1} if name == "nemotron_dense" else {"spec_type": "mtp", "n_draft_max": 2}
    )
    r, texts = rig(path, np=3, ubatch=24, n_draft_fixed=True, **how), known_texts(path)
    heard = [r.submit(prompt, N_TEXT) for prompt in texts]
    r.run()
    assert [h.tokens for h in heard] == list(texts.values())


def test_packed_experts_give_the_same_text() -> None:
    prompt, text = next(iter(known_texts(MODEL).items()))
    assert plain_rig(MODEL, weights="packed").generate(prompt, N_TEXT).tokens == text


def test_a_seed_gives_its_text_with_drafts_and_without() -> None:
    prompt = list(known_texts(MODEL))[1]
    params = replace(GREEDY, temperature=0.8, seed=3)
    want = plain_rig(MODEL).generate(prompt, N_TEXT, params).tokens
    r = rig(MODEL, np=4, spec_type="mtp", n_draft_max=3, n_draft_fixed=True)
    heard = [r.submit(prompt, N_TEXT, params, slot=s) for s in range(4)]
    r.run()
    assert all(h.tokens == want for h in heard)


def test_two_hundred_refused_rounds_leave_no_trace() -> None:
    """S6: random drafts, all rolled back, against no speculation."""
    prompt = next(iter(known_texts(MODEL)))
    want = plain_rig(MODEL).generate(prompt, 201).tokens
    liar = rig_for(MODEL, FAKES["liar"](5, text=lambda tokens, n: [(sum(tokens) * 7 + i) % 298 for i in range(n)]))
    h = liar.generate(prompt, 201)
    assert h.timings.n_rounds > 180 and h.tokens == want


def test_a_prompt_that_was_shared_goes_on_from_its_checkpoint() -> None:
    """State, window and the MTP block's hidden state come back; the text is that of a cold start."""
    (prompt, text), r = list(known_texts(MODEL).items())[4], rig(MODEL, spec_type="mtp", n_draft_max=3)
    long = next(p for p in known_texts(MODEL) if len(p) == 101)
    want = plain_rig(MODEL).generate([*long, 5, 6], 20).tokens
    r.generate(long, 20)
    h = r.generate([*long, 5, 6], 20)
    started = next(e for e in h.events if isinstance(e, Started))
    assert h.tokens == want and started.n_cached > 64
    assert r.generate(prompt, N_TEXT).tokens == text


def test_without_a_word_a_file_with_the_block_drafts_with_it() -> None:
    assert rig(MODEL).info.drafter == "mtp" and rig(FIXTURES / "nemotron_dense.gguf").info.drafter == "none"


def test_a_file_of_the_block_alone_drafts_for_a_target_without_it() -> None:
    target, block = tiny("nemotron_h_moe", mtp=False), tiny("nemotron_h_moe", sidecar=True)
    r, texts = rig(target, np=2, draft_path=block, n_draft_max=2, n_draft_fixed=True), known_texts(target, 4)
    heard = [r.submit(prompt, N_TEXT) for prompt in texts]
    r.run()
    assert [h.tokens for h in heard] == list(texts.values())
    assert r.info.drafter == "mtp" and sum(h.timings.draft_n for h in heard) > 50
