"""A short prompt that comes again needs no forward: its last logits are kept, and its text is the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from engine_rig import FIXTURES, GREEDY, Rig, plain_rig, rig
from known_texts import tiny
from test_prefix_reuse import random_ids

from pyspec.engine.loop.loop import Loop
from pyspec.request import Grammar, SamplingParams

QWEN35, NEMOTRON = FIXTURES / "qwen35.gguf", FIXTURES / "nemotron_latent.gguf"
MAKERS: dict[str, Callable[..., Rig]] = {
    "mtp": lambda **s: rig(QWEN35, spec_type="mtp", n_draft_max=3, n_draft_fixed=True, **s),
    "dflash": lambda **s: rig(tiny("qwen35"), draft_path=tiny("qwen35", drafter=True), n_draft_fixed=True, **s),
    "gemma3": lambda **s: rig(FIXTURES / "gemma3.gguf", spec_type="ngram", ngram_match=1, n_draft_fixed=True, batch=21, **s),
    "nemotron": lambda **s: rig(NEMOTRON, spec_type="ngram", ngram_match=1, n_draft_fixed=True, **s),
}  # fmt: skip
SAMPLED = SamplingParams(temperature=0.9, seed=4)
ASKS: list[dict[str, object]] = [
    {},
    {"params": SAMPLED},
    {"params": replace(SAMPLED, seed=9, repeat_penalty=1.2, logprobs=2)},
    {"params": replace(GREEDY, logit_bias=((5, 2.0), (9, -torch.inf)))},
    {"n": 1},
    {"grammar": Grammar(kind="json_schema", source=json.dumps({"type": "array", "items": {"type": "integer"}}))},
    {"stop": ("e",), "params": SAMPLED},
]  # fmt: skip


def ask(r: Rig, prompt: list[int], said: dict[str, object]) -> tuple[object, ...]:
    said = dict(said)
    h = r.generate(prompt, said.pop("n", 14), said.pop("params", GREEDY), **said)  # type: ignore[arg-type]
    assert h.error is None
    return h.tokens, h.text, h.finish, h.timings.cache_n


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_every_way_to_ask_again_gives_the_text_of_a_cold_engine(
    kind: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    r, prompt = MAKERS[kind](np=4), random_ids(11, 23)
    r.loop.lookahead.on = ahead
    forwards: list[int] = []
    run = r.loop.worker.forward
    monkeypatch.setattr(
        r.loop.worker, "forward", lambda batch: forwards.append(batch.n_row) or run(batch)
    )
    for said in ASKS:
        want = ask(r, prompt, {**said, "cache_prompt": False})
        first, n = ask(r, prompt, said), len(forwards)
        for _ in range(2):
            again = ask(r, prompt, said)
            assert again == (*want[:3], 22), said
        if said.get("n") == 1:
            assert len(forwards) == n, "nothing was run"
        assert first[:3] == want[:3]
    assert min(forwards) >= 1


@pytest.mark.parametrize("kind", ["mtp"])
def test_twins_that_come_again_together_and_join_others_keep_their_texts(kind: str) -> None:
    r, prompts = MAKERS[kind](np=4, ubatch=24), [random_ids(i, 9 + 7 * i) for i in range(5)]
    cold = plain_rig(QWEN35)
    want = [cold.generate(p, 12, SAMPLED).tokens for p in prompts]
    for _ in range(3):
        heard = []
        for p in (*prompts, *prompts):
            heard.append(r.submit(p, 12, SAMPLED))
            r.loop.step()
        r.run()
        assert [h.tokens for h in heard] == want * 2
    assert r.loop.cache.states.starts


def test_what_goes_on_behind_a_short_prompt_goes_on_from_its_end(mtp: Rig) -> None:
    prompt = random_ids(3, 30)
    mtp.generate(prompt, 3)
    longer = [*prompt, *random_ids(4, 12)]
    h = mtp.generate(longer, 10)
    assert h.timings.cache_n == 30 and h.tokens == plain_rig(QWEN35).generate(longer, 10).tokens
    scored = mtp.generate(prompt, 4, prompt_logprobs=1)
    assert scored.timings.cache_n == 0, "every row of it has to run"


@pytest.fixture
def mtp() -> Rig:
    return MAKERS["mtp"](np=4)


def test_starts_have_a_bound_of_their_own_and_put_nobody_else_out(mtp: Rig) -> None:
    states = mtp.loop.cache.states
    mtp.generate(random_ids(1, 20), 4)
    ((_, size),) = states.starts.items()
    n_other = len(states)
    states.start_limit = 2 * size
    for i in range(2, 6):
        mtp.generate(random_ids(i, 20), 4)
    assert len(states.starts) == 2 and states.n_start_bytes == 2 * size and len(states) >= n_other
    assert mtp.generate(random_ids(5, 20), 4).timings.cache_n == 19
    assert mtp.generate(random_ids(2, 20), 4).timings.cache_n == 0
    heard = [mtp.submit(random_ids(10 + i, 20), 30) for i in range(4)]
    mtp.steps(4)
    assert states.n_start_bytes == 2 * size and not states.starts, "two that run hold theirs"
    for h in heard[:2]:
        mtp.loop.cancel(h.job)
    mtp.run()
    states.start_limit = 0
    mtp.generate(random_ids(6, 20), 4)
    assert not states.starts and states.n_start_bytes == 0


def test_a_failure_gives_back_what_was_reserved(mtp: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    states = mtp.loop.cache.states
    h = mtp.submit(random_ids(1, 20), 30)
    mtp.steps(3)
    assert states.n_start_bytes > 0
    monkeypatch.setattr(Loop, "lay_out", lambda self, drafts: 1 / 0)
    mtp.loop.step()
    monkeypatch.undo()
    assert h.error is not None and states.n_start_bytes == 0


def test_a_bad_row_that_is_kept_ends_its_own_request(mtp: Rig) -> None:
    prompt = random_ids(1, 20)
    mtp.generate(prompt, 4)
    (state,) = mtp.loop.cache.states.starts
    state.content.logits.fill_(torch.nan)  # type: ignore[attr-defined]
    h = mtp.submit(prompt, 4)
    mtp.run()
    assert h.error is not None and "NaN" in str(h.error)
