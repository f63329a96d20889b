"""Nemotron-H gives the text of plain single-slot decoding, with any drafts of its MTP block and any neighbours."""

from __future__ import annotations

import pytest
from draft_fakes import FAKES
from engine_rig import FIXTURES, plain_rig, rig, rig_for
from known_texts import N_TEXT, known_texts, tiny

from pyspec.request import Started

MODEL = FIXTURES / "nemotron_latent.gguf"


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("np", [1, 2, 4, 8])
def test_same_text_with_n_grams(np: int) -> None:
    r = rig(MODEL, np=np, ubatch=40, spec_type="ngram", ngram_match=1, n_draft_fixed=True)
    texts = known_texts(MODEL)
    heard = [r.submit(prompt, N_TEXT) for prompt in texts]
    r.run()
    assert [h.tokens for h in heard] == list(texts.values())
    assert sum(h.timings.draft_n for h in heard) > 50


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("name", ["nemotron_dense", "nemotron_moe", "nemotron_latent_q8_0"])
def test_other_kinds_give_the_same_text(name: str) -> None:
    """Dense; experts at full width; experts as Q5_0, unpacked where they are used."""
    path = FIXTURES / f"{name}.gguf"
    how = (
        {"spec_type": "ngram", "ngram_match": 1}
        if name == "nemotron_dense"
        else {"spec_type": "mtp", "n_draft_max": 2}
    )
    r, texts = rig(path, np=3, ubatch=24, n_draft_fixed=True, **how), known_texts(path)
    heard = [r.submit(prompt, N_TEXT) for prompt in texts]
    r.run()
    assert [h.tokens for h in heard] == list(texts.values())


@pytest.mark.slow
def test_two_hundred_refused_rounds_leave_no_trace() -> None:
    """S6: random drafts, all rolled back, against no speculation."""
    prompt = next(iter(known_texts(MODEL)))
    want = plain_rig(MODEL).generate(prompt, 201).tokens
    liar = rig_for(
        MODEL, FAKES["liar"](5, text=lambda tokens, n: [(sum(tokens) * 7 + i) % 298 for i in range(n)])
    )
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
    assert (
        rig(MODEL).info.drafter == "mtp" and rig(FIXTURES / "nemotron_dense.gguf").info.drafter == "none"
    )


def test_a_file_of_the_block_alone_drafts_for_a_target_without_it() -> None:
    target, block = tiny("nemotron_h_moe", mtp=False), tiny("nemotron_h_moe", sidecar=True)
    r, texts = (
        rig(target, np=2, draft_path=block, n_draft_max=2, n_draft_fixed=True),
        known_texts(target, 4),
    )
    heard = [r.submit(prompt, N_TEXT) for prompt in texts]
    r.run()
    assert [h.tokens for h in heard] == list(texts.values())
    assert r.info.drafter == "mtp" and sum(h.timings.draft_n for h in heard) > 50
