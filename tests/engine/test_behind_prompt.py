"""Rounds behind a prompt that runs alone are launched while the device reads it, and texts stay what they are."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from draft_fakes import N_VOCAB
from engine_rig import GREEDY, Heard, Rig, plain_rig, rig
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


class OftenAlone(RandomPick):
    """Lets most whole prompts run alone, the oldest first."""

    def __call__(self, whole: Sequence[int], n_other: int, n_verify: int, *_: float) -> int | None:
        able = [i for i, n in enumerate(whole) if n]
        if not able or not n_verify or self.rng.random() < 0.1:
            return None
        self.n += 1
        return able[0]


def churn(r: Rig, path: Path, np: int, **request: object) -> list[Heard]:
    """Requests that join in bursts, end by length or by a token, leave, and continue cached texts; each with its text alone."""
    rng = random.Random(np)
    header = [rng.randrange(3, 60) for _ in range(40)]
    prompts = [[rng.randrange(3, 60) for _ in range(rng.randrange(2, 70))] for _ in range(5 * np)]
    prompts = [header + p[:20] if i % 4 == 3 else p for i, p in enumerate(prompts)]
    lengths = [rng.randrange(1, 30) for _ in prompts]
    ends = frozenset(rng.sample(range(N_VOCAB), N_VOCAB // 12))
    asked: list[dict[str, object]] = [
        {"params": replace(GREEDY, ignore_eos=False), "eog": ends} if i % 3 == 0 else {} for i in range(len(prompts))
    ]
    alone = plain_rig(path)
    want = [alone.generate(p, n, **a).tokens for p, n, a in zip(prompts, lengths, asked, strict=True)]  # type: ignore[arg-type]
    heard = []
    for i, (prompt, n, a) in enumerate(zip(prompts, lengths, asked, strict=True)):
        heard.append(r.submit(prompt, n, **a))  # type: ignore[arg-type]
        if i % 5 == 4:
            r.loop.cancel(heard[-2].job)
        if i % np == np - 2:
            for _ in range(rng.randrange(3, 25)):
                r.loop.step()
                r.loop.cache.check(now=True)
    r.run()
    for h, tokens in zip(heard, want, strict=True):
        assert h.tokens == tokens or (h.finish == "cancelled" and h.tokens == tokens[: len(h.tokens)])
    return heard


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
    r.loop.pace.alone.pick = OftenAlone()  # type: ignore[method-assign]
    found = count(r)
    churn(r, path, np)
    print(name, np, on, dict(found))
