"""Rounds behind a prompt that runs alone are launched while the device reads it, and texts stay what they are."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from engine_rig import FIXTURES, Rig, plain_rig, rig
from known_texts import tiny
from test_prompts_alone import MODELS, RandomPick

from pyspec.engine.loop import behind_prompt
from pyspec.engine.loop.pending_round import PendingRound

KINDS = {
    **MODELS,
    "qwen35 dflash": (
        tiny("qwen35"),
        {"draft_path": tiny("qwen35", drafter=True), "n_draft_fixed": True},
    ),
}


def count(r: Rig) -> Counter[str]:
    """Rounds that follow a lone prompt: launched ahead or from the host, another such prompt or one that decodes."""
    found: Counter[str] = Counter()
    read, before = r.loop.read, [False]

    def watched(pending: PendingRound, ahead: PendingRound | None) -> None:
        others = len(r.loop.jobs) > len(pending.work)
        if before[0]:
            kind = "prompt" if not pending.work[0].job.is_decoding else "decode"
            joint = any(w.is_prompt for w in pending.work) and len(pending.work) > 1
            found[f"{'joint' if joint else kind} {'ahead' if pending.is_behind else 'host'}"] += 1
        before[0] = others and len(pending.work) == 1 and pending.work[0].is_prompt
        read(pending, ahead)

    r.loop.read = watched  # type: ignore[method-assign]
    return found


def churn(r: Rig, path: Path, np: int) -> None:
    rng = random.Random(np)
    prompts = [[rng.randrange(3, 60) for _ in range(rng.randrange(2, 70))] for _ in range(4 * np)]
    lengths = [rng.randrange(1, 40) for _ in prompts]
    alone = plain_rig(path)
    want = [alone.generate(p, n).tokens for p, n in zip(prompts, lengths, strict=True)]
    heard = []
    for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
        heard.append(r.submit(prompt, n))
        if i % 5 == 4:
            r.loop.cancel(heard[-2].job)
        for _ in range(rng.randrange(9)):
            r.loop.step()
    r.run()
    for h, tokens in zip(heard, want, strict=True):
        assert h.tokens == tokens or (h.finish == "cancelled" and h.tokens == tokens[: len(h.tokens)])


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("np", [3, 5])
@pytest.mark.parametrize("name", [*KINDS])
def test_texts(name: str, np: int, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind_prompt, "ON", on)
    path, settings = KINDS[name]
    assert isinstance(path, Path)
    r = rig(path, np=np, **settings)  # type: ignore[arg-type]
    r.run_ahead(defers=True)
    r.overwrite_results()
    r.loop.pace.alone.pick = RandomPick()  # type: ignore[method-assign]
    found = count(r)
    churn(r, path, np)
    print(name, np, on, dict(found))
