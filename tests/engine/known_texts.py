"""Greedy texts of real models, and tiny models to make them with."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from engine_rig import GREEDY, ROOT, Heard, Rig, plain_rig

from pyspec import synth
from pyspec.engine.api import Result
from pyspec.request import Delta

N_TEXT = 30
MARGIN = 2e-3  # least distance to the second best token: rounding by batch shapes stays far below


@cache
def tiny(
    kind: str, *, drafter: bool = False, fork: bool = False, sidecar: bool = False, mtp: bool = True
) -> Path:
    """A tiny random model in a temporary folder, F32 so that rounding is about 1e-5."""
    name = f"{kind}{'-dflash' * drafter}{'-fork' * fork}{'-mtp' * sidecar}{'' if mtp else '-trunk'}.gguf"
    path = Path(mkdtemp(prefix="pyspec-tiny-")) / name
    return synth.write(
        kind, path, quant="f32", tiny=True, drafter=drafter, fork=fork, sidecar=sidecar, mtp=mtp
    )


@cache
def known_texts(path: Path, n: int = 9) -> dict[tuple[int, ...], list[int]]:
    """`n` prompts of many lengths with their texts by plain single-slot decoding, without near ties."""
    rig = plain_rig(path)
    texts: dict[tuple[int, ...], list[int]] = {}
    rng = random.Random(0)
    while len(texts) < n:
        prompt = tuple(
            rng.choices(range(rig.info.n_vocab), k=rng.choice((1, 6, 15, 16, 17, 33, 64, 101)))
        )
        h = rig.generate(prompt, N_TEXT, replace(GREEDY, logprobs=2), cache_prompt=False)
        gaps = [p.top[0][1] - p.top[1][1] for e in h.events if isinstance(e, Delta) for p in e.logprobs]
        if min(gaps) > MARGIN:
            texts[prompt] = h.tokens
    return texts


def continuation(path: Path, tokens: Sequence[int], n: int) -> list[int]:
    """The tokens after `tokens` in one of the known texts; empty if it is none of them."""
    for prompt, text in known_texts(path).items():
        whole = [*prompt, *text]
        if len(tokens) >= len(prompt) and list(tokens) == whole[: len(tokens)]:
            return whole[len(tokens) : len(tokens) + n]
    return []


@cache
def demo_prompts() -> list[tuple[tuple[int, ...], list[int]]]:
    """Prompts of the packaged pair with the answers it was trained for, without near ties."""
    lines = (ROOT / "pyspec" / "demo" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    sure = [r for r in rows if r["min_logit_margin"] >= 0.1 and r["stop"] == "eos"]
    return [(tuple(r["prompt_ids"]), r["answer_ids"]) for r in sure]


def joined(
    r: Rig, texts: Iterable[Sequence[int]], n: int = N_TEXT, *, cancels: bool = False
) -> list[Heard]:
    """A request every second round. cancels: with others among them, which are cancelled some rounds later."""
    heard: list[Heard] = []
    others: list[Heard] = []
    for i, prompt in enumerate(texts):
        heard.append(r.submit(prompt, n))
        if cancels and i % 3 == 1:
            others.append(r.submit(prompt[::-1], n))
        r.steps(2)
        if i % 3 == 0:
            while others:
                r.loop.cancel(others.pop().job)
    for other in others:
        r.loop.cancel(other.job)
    r.run()
    return heard


def n_same(want: Result, got: Result, margin: float) -> int:
    """Tokens up to the end, or up to a near tie, which may fall either way beside other rows. The best tokens' log probabilities agree so far."""
    for i, (entry, other) in enumerate(zip(want.logprobs, got.logprobs, strict=True)):
        a, b = (sorted((x for _, x in e.top), reverse=True) for e in (entry, other))
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < margin, f"at {i}: {a}, {b}"
        if want.tokens[i] != got.tokens[i]:
            assert a[0] - a[1] < margin, f"the texts part at {i}"
            return i
    return len(want.tokens)
