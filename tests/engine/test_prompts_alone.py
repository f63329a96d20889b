"""Rounds of one prompt, while all other requests rest: at any time, texts stay what they are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from engine_rig import FIXTURES, Rig, plain_rig, rig
from plans import fix_alone

from pyspec.slots.drafts import Drafts

MTP = {"spec_type": "mtp", "n_draft_max": 3, "n_draft_fixed": True}
MODELS = {
    "qwen35 mtp": (FIXTURES / "qwen35.gguf", MTP),
    "llama ngram": (FIXTURES / "llama.gguf", {"spec_type": "ngram", "n_draft_fixed": True}),
    "deepseek4 ngram": (FIXTURES / "deepseek4.gguf", {"spec_type": "ngram", "n_draft_fixed": True}),
    "nemotron plain": (FIXTURES / "nemotron_moe.gguf", {"spec_type": "none"}),
}


class RandomPick:
    """Lets any whole prompt run alone, half of the time. n: how often one did while others decoded."""

    def __init__(self) -> None:
        self.rng, self.n = random.Random(5), 0

    def __call__(self, whole: Sequence[int], n_verify: int) -> int | None:
        able = [i for i, n in enumerate(whole) if n]
        if not able or self.rng.random() < 0.5:
            return None
        self.n += n_verify > 0
        return self.rng.choice(able)


def watched(r: Rig) -> RandomPick:
    pick = RandomPick()
    fix_alone(r.loop, pick)
    draft = r.loop.draft

    def drafted() -> dict[int, Drafts]:
        found = draft()
        if all(not job.is_decoding for job in r.loop.awake) and len(r.loop.jobs) > len(r.loop.awake):
            assert r.loop.speculator.planned is None, "lengths of slots that rest are chosen anew"
        return found

    r.loop.draft = drafted  # type: ignore[method-assign]
    return pick


def ahead(r: Rig) -> None:
    r.run_ahead(defers=True)
    r.overwrite_results()


@pytest.mark.parametrize("how", [ahead, lambda r: None], ids=["ahead", "one by one"])
@pytest.mark.parametrize("np", [3, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*MODELS])
@pytest.mark.sampled(most=4)
def test_texts_with_prompts_that_run_alone(name: str, np: int, how: Callable[[Rig], None]) -> None:
    path, settings = MODELS[name]
    assert isinstance(path, Path)
    rng = random.Random(np)
    prompts = [[rng.randrange(3, 60) for _ in range(rng.randrange(2, 70))] for _ in range(3 * np)]
    lengths = [rng.randrange(4, 40) for _ in prompts]
    alone = plain_rig(path)
    want = [alone.generate(p, n).tokens for p, n in zip(prompts, lengths, strict=True)]
    r = rig(path, np=np, **settings)  # type: ignore[arg-type]
    how(r)
    pick = watched(r)
    heard = []
    for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
        heard.append(r.submit(prompt, n))
        if i % 5 == 4:
            r.loop.cancel(heard[-2].job)
        r.steps(rng.randrange(6))
    r.run()
    assert pick.n, "no slot had to rest"
    for h, tokens in zip(heard, want, strict=True):
        assert h.tokens == tokens or (h.finish == "cancelled" and h.tokens == tokens[: len(h.tokens)])


def test_a_prompt_that_was_begun_or_is_scored_never_runs_alone() -> None:
    r = rig(FIXTURES / "qwen35.gguf", np=2, spec_type="none", batch=16)
    pick = watched(r)
    first = r.submit([5, 6, 7], 40)
    r.steps(3)
    asked: list[Sequence[int]] = []

    def watch(whole: Sequence[int], n_verify: int) -> int | None:
        asked.append(tuple(whole))
        return None

    del r.loop.controller.plan
    fix_alone(r.loop, watch)
    second = r.submit(list(range(3, 43)), 4)
    r.run()
    assert asked[0] == (40,) and set(asked[1:]) == {(0,)} and len(asked) > 2
    assert first.over and second.over and not pick.n
